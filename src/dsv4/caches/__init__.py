"""Rows as bytes in pages: KV rows (kv.py), index keys (index_keys.py), the pages of both (pages.py)."""
