"""The endpoints that clients call: HTTP, gRPC and the dashboard."""
