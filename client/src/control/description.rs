//! The description that a client sends when an operator lists the clients.

use std::sync::OnceLock;

use farside_control::{ClientDescription, Request};

use super::session_counts::Totals;
use super::{ControlQueue, lock};

/// The names of this host and of this program.
fn names() -> &'static [String; 2] {
    static NAMES: OnceLock<[String; 2]> = OnceLock::new();
    NAMES.get_or_init(|| {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let path = std::env::current_exe().unwrap_or_default();
        let program = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        [host, program]
    })
}

impl ControlQueue {
    /// Sends a description of this client.
    pub(super) fn describe(&self) {
        self.send_if_none_is_queued(
            |request| matches!(request, Request::Description(_)),
            || Request::Description(self.description()),
        );
    }

    fn description(&self) -> ClientDescription {
        let [host, program] = names();
        let blocks_held = lock(&self.sessions).iter().map(|session| session.blocks_held()).sum();
        let latency = self.metrics.get().and_then(|metrics| metrics.get_latency());
        let (get_p50_ns, get_p99_ns) = latency.unwrap_or_default();
        let Totals { sessions, operations, reads } = lock(&self.counts).totals();
        ClientDescription {
            pid: std::process::id(),
            host: host.clone(),
            program: program.clone(),
            sessions,
            blocks_held,
            operations,
            reads_found: reads.found,
            reads_absent: reads.absent,
            get_p50_ns,
            get_p99_ns,
        }
    }
}
