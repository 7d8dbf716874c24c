"""Continuous batching over `tilefold.PagedKVCache`, small enough to read: model, requests, engine, comparison, report."""
