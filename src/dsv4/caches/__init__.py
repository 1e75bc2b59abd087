"""Rows as bytes in pages: row formats (formats.py), pages (pages.py), KV rows (kv.py), index keys (index_keys.py)."""
