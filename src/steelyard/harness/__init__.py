"""The harness: takes leases, runs the agent's turns and tools, and hands in what came of it."""
