"""Tests on a real GPU; all of them are skipped where there is none. Their figures go to a JSON file below $OUT."""
