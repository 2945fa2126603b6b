"""Where runs of KV pages outlive the process that computed them: the store tier (L3)."""
