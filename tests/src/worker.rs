//! Processes at work on a server: binaries of the tests that check what they see.

use std::ffi::OsStr;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use rustix::process::Signal;

use crate::ServerProcess;

/// Such a process. It is killed with its value.
pub struct Worker {
    child: Child,
    errors: PathBuf,
}

impl Worker {
    /// Starts a program with the server's address, and `arguments` behind it. What it complains of
    /// goes to a file of the server's folder that has this number.
    pub fn start<A: AsRef<OsStr>>(
        program: &str,
        server: &ServerProcess,
        number: u64,
        arguments: impl IntoIterator<Item = A>,
    ) -> Self {
        let errors = server.folder().join(format!("worker-{number}"));
        let child = Command::new(program)
            .arg(server.address())
            .args(arguments)
            .stdin(Stdio::null())
            .stderr(std::fs::File::create(&errors).unwrap())
            .spawn()
            .unwrap();
        Self { child, errors }
    }

    fn errors(&self) -> String {
        std::fs::read_to_string(&self.errors).unwrap()
    }

    /// That it has not ended by itself for a reason.
    pub fn check(&mut self) {
        if let Some(status) = self.child.try_wait().unwrap() {
            assert!(status.success(), "a worker failed: {status}: {}", self.errors());
        }
    }

    /// Kills it; until then it must have seen nothing wrong.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.is_killed_or_well();
    }

    /// Whether SIGKILL has ended it, which it may have sent itself; any other end must be a good
    /// one.
    pub fn has_died(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some() && self.is_killed_or_well()
    }

    /// Waits for its end; whether SIGKILL was it.
    pub fn is_killed_or_well(&mut self) -> bool {
        let status = self.child.wait().unwrap();
        assert_eq!(self.errors(), "", "a worker that ended had seen something");
        let is_killed = status.signal() == Some(Signal::KILL.as_raw());
        assert!(is_killed || status.success(), "a worker failed: {status}");
        is_killed
    }

    /// Stops it, as a debugger would; returns once it is stopped.
    pub fn stop(&self) {
        crate::send_signal(&self.child, Signal::STOP);
        let status = format!("/proc/{}/status", self.child.id());
        while !std::fs::read_to_string(&status).unwrap().contains("State:\tT") {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    /// Lets it go on.
    pub fn go_on(&self) {
        crate::send_signal(&self.child, Signal::CONT);
    }

    /// Waits until it ends, which it must do well.
    pub fn wait(mut self) {
        let status = self.child.wait().unwrap();
        assert!(status.success(), "a worker failed: {status}: {}", self.errors());
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
