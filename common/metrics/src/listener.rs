//! The thread that serves metrics over HTTP: `GET /metrics`.
//!
//! It sleeps until a request comes. So metrics cost nothing while no one reads them.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::thread::{self, JoinHandle};

use rustix::event::{EventfdFlags, eventfd};

use crate::MetricsFormat;
use crate::connections::MetricsConnections;
use crate::http::PATH;

/// A bound listener. Requests that come before [`MetricsListener::serve`] wait.
#[derive(Debug)]
pub struct MetricsListener {
    listener: TcpListener,
    address: SocketAddr,
}

/// Says why [`MetricsListener::bind`] failed, and what to do.
pub fn why_not_bound(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "another program listens there: stop it or take another port".to_owned()
        }
        io::ErrorKind::AddrNotAvailable => {
            "it is no address of this host: `ip address` shows its addresses".to_owned()
        }
        _ => error.to_string(),
    }
}

impl MetricsListener {
    /// Binds a listener.
    ///
    /// # Errors
    /// The system's; see [`why_not_bound`].
    pub fn bind(address: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok(Self { listener, address })
    }

    /// Starts a thread that answers requests. `text` returns the metrics; `None` if there are none
    /// at present.
    ///
    /// # Errors
    /// The system's, if it makes no thread or descriptor.
    pub fn serve(
        self,
        mut text: impl FnMut(MetricsFormat) -> Option<String> + Send + 'static,
    ) -> io::Result<MetricsServer> {
        let Self { listener, address } = self;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let stopped = stop.try_clone()?;
        let mut connections = MetricsConnections::new(listener);
        let serve = move || loop {
            match connections.step(&stopped, &mut text) {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    tracing::error!("FS-009 there are no metrics any more: {error}");
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name("farside-metrics".to_owned()).spawn(serve)?;
        tracing::info!("metrics are at http://{address}{PATH}");
        Ok(MetricsServer { address, stop, thread: Some(thread) })
    }
}

/// The thread that answers requests for metrics. It ends when this is dropped.
#[derive(Debug)]
pub struct MetricsServer {
    address: SocketAddr,
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl MetricsServer {
    /// Returns the address at which requests are answered.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        // The write fails only if the counter is full, and then the thread wakes anyway.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        // A panic of the thread has been reported, and the program works without metrics.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
