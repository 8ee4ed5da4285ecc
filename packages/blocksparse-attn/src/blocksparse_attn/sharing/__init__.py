"""What ranks that share a cache need around attention to selected blocks."""
