//! Commands of Farside that run to their end, and checks of their output.

use std::io::Write;
use std::process::{Command, Output, Stdio};

use crate::binary;

/// Returns a command of Farside with the environment of a user without a config file.
pub fn command(name: &str) -> Command {
    let mut command = Command::new(binary(name));
    command.env("HOME", "/nowhere").env_remove("FARSIDE_SERVER").stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The exit code and output of a command.
#[derive(Debug)]
pub struct CommandOutput {
    /// The exit code; `None` if a signal ended the command.
    pub code: Option<i32>,
    /// Its stdout.
    pub stdout: Vec<u8>,
    /// Its stderr.
    pub stderr: String,
}

impl CommandOutput {
    /// Converts the output of a process.
    pub fn new(output: Output) -> Self {
        let stderr = String::from_utf8(output.stderr).unwrap();
        Self { code: output.status.code(), stdout: output.stdout, stderr }
    }

    /// Runs the command to its end.
    pub fn of(command: &mut Command) -> Self {
        Self::new(command.output().unwrap())
    }

    /// Runs the command to its end, with this stdin.
    pub fn with_stdin(command: &mut Command, stdin: &[u8]) -> Self {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(stdin).unwrap();
        Self::new(child.wait_with_output().unwrap())
    }

    /// Its stdout as text.
    pub fn text(&self) -> &str {
        str::from_utf8(&self.stdout).unwrap()
    }

    /// Checks that the exit code is 0; returns the output.
    #[track_caller]
    pub fn succeeded(self) -> Self {
        assert_eq!(self.code, Some(0), "{}{}", self.text(), self.stderr);
        self
    }

    /// Checks the exit code, stdout, and that stderr is empty exactly if the code is 0.
    #[track_caller]
    pub fn expect(&self, code: i32, stdout: impl AsRef<[u8]>) {
        assert_eq!(self.code, Some(code), "{}", self.stderr);
        assert_eq!(self.stdout, stdout.as_ref(), "{}", self.stderr);
        assert_eq!(self.stderr.is_empty(), code == 0, "{}", self.stderr);
    }

    /// Checks the exit code, that stdout is empty, and that stderr is one line with all `parts`,
    /// besides what a server logs about its start.
    #[track_caller]
    pub fn expect_line(&self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, Some(code), "{}", self.stderr);
        assert!(self.stdout.is_empty(), "{}", self.text());
        assert_eq!(complaints(&self.stderr), 1, "{}", self.stderr);
        let missing = parts.iter().find(|part| !self.stderr.contains(**part));
        assert_eq!(missing, None, "{}", self.stderr);
    }
}

/// The number of lines in a log that do not merely inform.
pub fn complaints(log: &str) -> usize {
    log.lines().filter(|line| !line.contains(" INFO ")).count()
}
