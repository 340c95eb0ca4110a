"""Where code that we do not trust runs: isolated, limited, one sandbox per attempt."""
