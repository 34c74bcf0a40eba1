"""Report: tables and pictures of what the formats hold; computes nothing."""
