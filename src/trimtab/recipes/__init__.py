"""Run: each recipe reads top to bottom: load, adapt, verify, train, keep. Recipes never detect a device."""
