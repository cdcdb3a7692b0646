"""Other formats of rollouts: ATIF, OpenAI messages, Parquet."""
