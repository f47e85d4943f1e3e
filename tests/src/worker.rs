//! Worker processes: binaries of the tests that use a server and check what they see.

use std::ffi::OsStr;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::Signal;

use crate::ServerProcess;
use crate::network::{Network, command_by};

/// A worker process; killed when dropped.
pub struct Worker {
    child: Child,
    errors: PathBuf,
}

impl Worker {
    /// Starts a program with the server's address and then `arguments`. Its stderr goes to a file
    /// with this number in the server's folder.
    pub fn start<A: AsRef<OsStr>>(
        program: &str,
        server: &ServerProcess,
        number: u64,
        arguments: impl IntoIterator<Item = A>,
    ) -> Self {
        Self::start_at(&server.address(), program, server.folder(), number, arguments)
    }

    /// As [`Worker::start`], with another address of the server, or seeds of a cluster. The file is
    /// in this folder.
    pub fn start_at<A: AsRef<OsStr>>(
        address: &str,
        program: &str,
        folder: &Path,
        number: u64,
        arguments: impl IntoIterator<Item = A>,
    ) -> Self {
        let mut command = Command::new(program);
        command.arg(address).args(arguments);
        Self::spawn(command, folder, number)
    }

    /// As [`Worker::start`], on the host of a server that is behind a network.
    pub fn start_beside<A: AsRef<OsStr>>(
        network: &Network,
        program: &str,
        folder: &Path,
        number: u64,
        arguments: impl IntoIterator<Item = A>,
    ) -> Self {
        let mut command = command_by(&network.on_host(), program);
        command.arg(Network::LOCAL_ADDRESS).args(arguments);
        Self::spawn(command, folder, number)
    }

    fn spawn(mut command: Command, folder: &Path, number: u64) -> Self {
        let errors = folder.join(format!("worker-{number}"));
        let child = command
            .stdin(Stdio::null())
            .stderr(std::fs::File::create(&errors).unwrap())
            .spawn()
            .unwrap();
        Self { child, errors }
    }

    fn errors(&self) -> String {
        std::fs::read_to_string(&self.errors).unwrap()
    }

    /// Checks that the process has not failed.
    pub fn check(&mut self) {
        if let Some(status) = self.child.try_wait().unwrap() {
            assert!(status.success(), "a worker failed: {status}: {}", self.errors());
        }
    }

    /// Kills the process, and checks that it had reported no error.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.wait_checked();
    }

    /// Returns whether SIGKILL has ended the process. The process may have sent the signal itself.
    /// Panics if the process failed in another way.
    pub fn was_killed(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some() && self.wait_checked()
    }

    /// Waits until the process exits, and returns whether SIGKILL ended it. Panics if the
    /// process failed in another way.
    pub fn wait_checked(&mut self) -> bool {
        let status = self.child.wait().unwrap();
        assert_eq!(self.errors(), "", "a worker that ended had reported an error");
        let is_killed = status.signal() == Some(Signal::KILL.as_raw());
        assert!(is_killed || status.success(), "a worker failed: {status}");
        is_killed
    }

    /// Stops the process, as a debugger would; returns once it is stopped.
    pub fn stop(&self) {
        crate::send_signal(&self.child, Signal::STOP);
        let status = format!("/proc/{}/status", self.child.id());
        while !std::fs::read_to_string(&status).unwrap().contains("State:\tT") {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    /// Continues a stopped process.
    pub fn resume(&self) {
        crate::send_signal(&self.child, Signal::CONT);
    }

    /// Waits until the process exits, and checks that it succeeded.
    pub fn wait(mut self) {
        assert!(!self.wait_checked(), "a worker was killed");
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
