"""Hardware: where devices stand, and what is known of those and of links that are not at hand."""
