"""MLPerf's DLRM-DCNv2: from a made click log on a laptop to Criteo 1TB."""
