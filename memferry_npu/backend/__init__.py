"""Devices behind one protocol (`base`), and the host operations behind one C ABI (`hostops`)."""
