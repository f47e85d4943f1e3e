//! Farside memory server.
