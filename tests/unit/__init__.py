"""Tests of single modules, in process and without gRPC."""
