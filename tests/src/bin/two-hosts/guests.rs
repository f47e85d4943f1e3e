//! Runs commands in the guests other than this program's own, through the folder that all guests
//! share, and freezes them or cuts their power.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use farside_tests::{TEST_TIMEOUT, wait_until};

/// A guest that runs tests/vm/hosts-agent.
pub(crate) struct Guest {
    pub(crate) name: &'static str,
    share: PathBuf,
    commands: Cell<u32>,
}

/// A command in a guest.
pub(crate) struct Running {
    /// The guest's name and the command, for messages.
    description: String,
    /// The path of its files, without their extensions.
    path: PathBuf,
}

/// Timeout of a guest's boot: three guests take half a minute on a busy machine.
const BOOT_TIMEOUT: Duration = Duration::from_secs(180);

impl Guest {
    /// Waits until the guest has booted.
    pub(crate) fn new(name: &'static str, share: &Path) -> Self {
        let guest = Self { name, share: share.to_owned(), commands: Cell::new(0) };
        wait_until("a guest is up", BOOT_TIMEOUT, || guest.folder().join("ready").exists());
        guest
    }

    fn folder(&self) -> PathBuf {
        self.share.join(self.name)
    }

    /// Starts a line of bash. With `exec` at its start, signals reach the program instead of bash.
    pub(crate) fn start(&self, command: &str) -> Running {
        let number = self.commands.replace(self.commands.get() + 1);
        let path = self.folder().join(number.to_string());
        std::fs::write(path.with_extension("new"), command).unwrap();
        std::fs::rename(path.with_extension("new"), path.with_extension("command")).unwrap();
        let running = Running { description: format!("{}: {command}", self.name), path };
        wait_until(&running.description, TEST_TIMEOUT, || running.pid().is_some());
        running
    }

    /// Runs a command that has to succeed; returns its output.
    pub(crate) fn run(&self, command: &str) -> String {
        let running = self.start(command);
        running.wait(TEST_TIMEOUT);
        running.output()
    }

    /// Sends a signal to a command.
    pub(crate) fn signal(&self, signal: &str, running: &Running) {
        self.run(&format!("kill -{signal} {}", running.pid().unwrap()));
    }

    /// Controls the guest's power: `freeze`, `thaw` or `kill`.
    pub(crate) fn power(&self, verb: &str) {
        let control = Command::new("tests/vm/hosts-control")
            .arg(&self.share)
            .args([verb, self.name])
            .output()
            .unwrap();
        assert!(control.status.success(), "{verb} {}: {control:?}", self.name);
    }
}

impl Running {
    fn read(&self, extension: &str) -> Option<String> {
        std::fs::read_to_string(self.path.with_extension(extension)).ok()
    }

    fn pid(&self) -> Option<u32> {
        self.read("pid")?.trim().parse().ok()
    }

    /// Returns the command's output so far, of both streams.
    pub(crate) fn output(&self) -> String {
        self.read("output").unwrap_or_default()
    }

    /// Waits until the command's output contains `text`.
    pub(crate) fn wait_for(&self, text: &str, timeout: Duration) {
        let started = Instant::now();
        while !self.output().contains(text) {
            let Self { description, .. } = self;
            let is_late = started.elapsed() > timeout;
            assert!(!is_late, "{description}: no `{text}` in {timeout:?}: {}", self.output());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until the command ends, and checks that it succeeded.
    pub(crate) fn wait(&self, timeout: Duration) {
        wait_until(&self.description, timeout, || self.read("code").is_some());
        let code = self.read("code").unwrap();
        assert_eq!(code.trim(), "0", "{}: {}", self.description, self.output());
    }
}
