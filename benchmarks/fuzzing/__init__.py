"""Random models and plans, trained by autopar and by a plain loop."""
