//! A server within a test.

use farside_config::ServerConfig;
use farside_server::Server;

/// Listens over shared memory, in a folder of its own, for as long as it lives.
pub(crate) struct TestServer {
    pub(crate) address: String,
    _server: Server,
    _folder: tempfile::TempDir,
}

impl TestServer {
    /// With this configuration, but for where it listens.
    pub(crate) fn start(config: ServerConfig) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let address = format!("shm://{}", folder.path().join("kv.sock").display());
        let listen = Some(address.parse().unwrap());
        let server = Server::start(&ServerConfig { listen, ..config }).unwrap();
        Self { address, _server: server, _folder: folder }
    }
}
