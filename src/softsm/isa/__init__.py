"""Instruction semantics, one file per PTX chapter. Importing this package fills the registries."""
