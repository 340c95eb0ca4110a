"""Where every sampled token is kept: open traces, sealed traces, the ledger and the blob store."""
