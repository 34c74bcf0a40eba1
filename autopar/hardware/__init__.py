"""Hardware: what is known of devices and links that are not at hand."""
