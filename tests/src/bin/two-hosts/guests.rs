//! The other guests: commands in them, through the folder that all share, and their power.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use farside_tests::{PATIENCE, wait_until};

/// A guest that runs tests/vm/hosts-agent.
pub(crate) struct Guest {
    pub(crate) name: &'static str,
    share: PathBuf,
    commands: Cell<u32>,
}

/// A command in a guest.
pub(crate) struct Running {
    what: String,
    /// Of its files, without their endings.
    path: PathBuf,
}

/// A boot of three guests on a busy machine takes half a minute.
const BOOT: Duration = Duration::from_secs(180);

impl Guest {
    /// Waits until it is up.
    pub(crate) fn new(name: &'static str, share: &Path) -> Self {
        let guest = Self { name, share: share.to_owned(), commands: Cell::new(0) };
        wait_until("a guest is up", BOOT, || guest.folder().join("ready").exists());
        guest
    }

    fn folder(&self) -> PathBuf {
        self.share.join(self.name)
    }

    /// Starts a line of bash; `exec` makes a kill meet the program itself.
    pub(crate) fn start(&self, command: &str) -> Running {
        let number = self.commands.replace(self.commands.get() + 1);
        let path = self.folder().join(number.to_string());
        std::fs::write(path.with_extension("new"), command).unwrap();
        std::fs::rename(path.with_extension("new"), path.with_extension("command")).unwrap();
        let running = Running { what: format!("{}: {command}", self.name), path };
        wait_until(&running.what, PATIENCE, || running.pid().is_some());
        running
    }

    /// Runs a command that has to succeed; returns what it printed.
    pub(crate) fn run(&self, command: &str) -> String {
        let running = self.start(command);
        running.wait(PATIENCE);
        running.output()
    }

    /// Sends a signal to a command.
    pub(crate) fn signal(&self, signal: &str, running: &Running) {
        self.run(&format!("kill -{signal} {}", running.pid().unwrap()));
    }

    /// `freeze`, `thaw` or `kill`.
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
    fn read(&self, ending: &str) -> Option<String> {
        std::fs::read_to_string(self.path.with_extension(ending)).ok()
    }

    fn pid(&self) -> Option<u32> {
        self.read("pid")?.trim().parse().ok()
    }

    /// What it printed so far, on either stream.
    pub(crate) fn output(&self) -> String {
        self.read("output").unwrap_or_default()
    }

    /// Waits for a line of its output.
    pub(crate) fn wait_for(&self, text: &str, most: Duration) {
        let started = Instant::now();
        while !self.output().contains(text) {
            let late = started.elapsed() > most;
            assert!(!late, "{} did not say `{text}` in {most:?}: {}", self.what, self.output());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits for its end, which has to be a good one.
    pub(crate) fn wait(&self, most: Duration) {
        wait_until(&self.what, most, || self.read("code").is_some());
        let code = self.read("code").unwrap();
        assert_eq!(code.trim(), "0", "{}: {}", self.what, self.output());
    }
}
