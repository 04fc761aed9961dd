"""What was found, as a page that needs nothing else: one HTML file, no script, no network."""
