//! The client skeleton: signatures first.
#![allow(unused_variables, clippy::todo)]
use std::time::Duration;

use farside_common::config::ClientConfig;
use farside_common::control::{Role, ServerStatistics};

use crate::{Result, Session};

/// A client of one server. Cheap to clone; one per process is enough.
#[derive(Clone)]
pub struct Client(());

/// What a region allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The longest key, in bytes.
    pub key_bytes_max: usize,
    /// The longest value, in bytes.
    pub value_bytes_max: usize,
    /// How long an unlinked block stays untouched.
    pub grace: Duration,
}

impl Client {
    /// Starts a connection.
    pub fn builder() -> ClientBuilder {
        todo!()
    }
    /// A session for this thread.
    pub fn session(&self) -> Result<Session> {
        todo!()
    }
    /// What the region allows.
    pub fn limits(&self) -> Limits {
        todo!()
    }
    /// What the server knows; a round trip on the control channel.
    pub fn statistics(&self) -> Result<ServerStatistics> {
        todo!()
    }
    /// The region's length, in bytes.
    pub fn region_bytes(&self) -> u64 {
        todo!()
    }
}

/// How to connect.
pub struct ClientBuilder(());

impl ClientBuilder {
    /// Takes everything from a configuration.
    pub fn config(self, config: &ClientConfig) -> Self {
        todo!()
    }
    /// The server's address: `shm:///run/farside/kv.sock`.
    pub fn server(self, address: &str) -> Self {
        todo!()
    }
    /// Reader or writer (the default).
    pub fn role(self, role: Role) -> Self {
        todo!()
    }
    /// The shared secret, if the server wants one.
    pub fn secret(self, secret: &str) -> Self {
        todo!()
    }
    /// Memory for each session's location cache; 0 switches it off. 64 MiB by default.
    pub fn cache_bytes(self, bytes: usize) -> Self {
        todo!()
    }
    /// How many operations a session can have in flight, 1 to 1024. 64 by default.
    pub fn pipeline_depth(self, depth: u16) -> Self {
        todo!()
    }
    /// How long connecting, and reconnecting when the server went away, may take. 5 s by default.
    pub fn connect_timeout(self, timeout: Duration) -> Self {
        todo!()
    }
    /// Connects.
    pub fn connect(self) -> Result<Client> {
        todo!()
    }
}
