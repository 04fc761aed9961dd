"""Run: the GLUE+ benchmark, and those of memory and speed. No figure here is ever made up: what failed says so."""
