"""The exact, offloaded AdamW and its serial reference."""
