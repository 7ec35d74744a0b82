"""The Cohere model in torch. Imports neither grpc nor protobuf."""
