//! A child process that serves a Unix socket for the time of a run, with its socket and its log in
//! a temporary folder.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::slice;
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, Signal, getpid, getppid, kill_process, set_parent_process_death_signal,
};
use tempfile::TempDir;

use crate::command::Interrupt;
use crate::{Error, Result};

/// How long a server may take to provide its memory and listen. After that the start has failed.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// How long a server may take to stop. After that it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause between two checks whether the server is ready or has ended.
const PAUSE: Duration = Duration::from_millis(10);
const SOCKET: &str = "server.sock";
const LOG: &str = "server.log";

/// The process. It is stopped when this is dropped.
pub struct Daemon {
    child: Child,
    program: PathBuf,
    folder: TempDir,
}

impl Daemon {
    /// Starts a program, and waits until it answers at its socket. `arguments` makes the arguments
    /// from the path of the socket. The calling thread has to outlive the process: when the thread
    /// ends, the system ends the program.
    pub fn start(
        program: PathBuf,
        arguments: impl FnOnce(&Path) -> Vec<String>,
        answers: impl Fn(&Path) -> bool,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let mut daemon = Self::spawn(program, arguments, interrupt)?;
        let socket = daemon.socket();
        Self::wait_for(slice::from_mut(&mut daemon), || Ok(answers(&socket)), interrupt)?;
        Ok(daemon)
    }

    /// As [`Daemon::start`], but does not wait.
    pub fn spawn(
        program: PathBuf,
        arguments: impl FnOnce(&Path) -> Vec<String>,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("kv-bench-")
            .tempdir()
            .map_err(Error::system("making a temporary folder"))?;
        interrupt.remove_at_exit(folder.path());
        let create = || File::create(folder.path().join(LOG));
        let log = create().map_err(Error::system("making a log"))?;
        let errors = log.try_clone().map_err(Error::system("making a log"))?;
        let mut command = Command::new(&program);
        command
            .args(arguments(&folder.path().join(SOCKET)))
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(errors)
            // Ctrl-C in a terminal reaches only us, and we stop the server after our threads.
            .process_group(0);
        end_with_this_thread(&mut command);
        let child = command.spawn().map_err(Error::system("starting a server"))?;
        Ok(Self { child, program, folder })
    }

    /// Waits until `are_ready` returns true.
    ///
    /// # Errors
    /// [`Error::ServerStart`] if one of the processes has ended, or after a timeout.
    pub fn wait_for(
        daemons: &mut [Self],
        are_ready: impl Fn() -> Result<bool>,
        interrupt: &Interrupt,
    ) -> Result<()> {
        let started = Instant::now();
        loop {
            interrupt.check()?;
            if are_ready()? {
                return Ok(());
            }
            for daemon in &mut *daemons {
                let exited = daemon.child.try_wait().map_err(Error::system("watching a server"))?;
                if exited.is_some() || started.elapsed() > START_TIMEOUT {
                    let log = daemon.last_line();
                    return Err(Error::ServerStart { program: daemon.program.clone(), log });
                }
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// The path of its socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join(SOCKET)
    }

    /// The number of the process.
    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// Asks the process to stop, and does not wait. So several can stop at the same time.
    pub fn ask_to_stop(&self) {
        // Until it was waited for, the number belongs to no other process.
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
    }

    fn last_line(&self) -> String {
        let log = fs::read_to_string(self.folder.path().join(LOG)).unwrap_or_default();
        log.lines().last().unwrap_or("its log is empty").to_owned()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.ask_to_stop();
        let asked = Instant::now();
        while let Ok(None) = self.child.try_wait() {
            if asked.elapsed() > STOP_TIMEOUT {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            std::thread::sleep(PAUSE);
        }
    }
}

/// Makes the system end the program when this thread ends. Without it the program would outlive
/// this process if this process were killed.
#[allow(unsafe_code, reason = "only few calls are allowed between fork and exec")]
fn end_with_this_thread(command: &mut Command) {
    let parent = getpid();
    let prepare = move || {
        set_parent_process_death_signal(Some(Signal::TERM))?;
        // The parent may have ended before this call, and then no signal comes.
        if getppid() == Some(parent) { Ok(()) } else { Err(io::ErrorKind::NotFound.into()) }
    };
    // SAFETY: `prepare` makes two system calls; it allocates nothing and takes no lock.
    unsafe { command.pre_exec(prepare) };
}

/// Finds a program of this name in this folder, or in PATH if it is not there.
pub fn find_program(name: &str, folder: Option<&Path>) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = folder.map(Path::to_owned).into_iter().chain(std::env::split_paths(&path));
    folders.map(|folder| folder.join(name)).find(|program| program.is_file())
}
