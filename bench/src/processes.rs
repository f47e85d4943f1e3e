//! A run by several processes, as many clients on many machines would make it.
//!
//! kv-bench starts itself, with the same command line and the number of the process. A child is
//! told on stdin which server there is, when to warm up and when to measure. On stdout it tells
//! what it did. Both are JSON objects, one a line. When stdin ends its parent is gone, and the
//! child ends.

use std::io::{self, BufRead, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use farside_config::ClientConfig;
use farside_config::command_line::{exit_code, one_line};
use serde::{Deserialize, Serialize};

use crate::args::Ycsb;
use crate::command::Interrupt;
use crate::environment::Environment;
use crate::progress::ProgressLine;
use crate::server::Server;
use crate::thread_measurement::{Supervised, ThreadMeasurement};
use crate::{Error, Result};

/// What a parent tells.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Order {
    Load { server: String, is_own: bool },
    WarmUp,
    Measure,
}

/// What a child tells.
#[derive(Serialize, Deserialize)]
enum Message {
    /// In all phases, so far.
    Operations(u64),
    Loaded,
    Measured {
        threads: Box<ThreadMeasurement>,
        environment: Environment,
    },
    Failed {
        said: String,
        code: u8,
    },
}

/// How long children may take to end by themselves.
const END_TIMEOUT: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(5);

/// Runs a workload with as many processes as it asks for.
pub fn run(
    args: &Ycsb,
    server: &Server,
    interrupt: &Interrupt,
) -> Result<(ThreadMeasurement, Supervised)> {
    let mut children = Children::start(args)?;
    let load = Instant::now();
    children.tell(&Order::Load { server: server.address().to_owned(), is_own: server.is_own() })?;
    children.wait("load", interrupt, |child| child.has_loaded)?;
    let load_seconds = load.elapsed().as_secs_f64();
    children.tell(&Order::WarmUp)?;
    let warm = Instant::now() + Duration::from_secs_f64(args.warmup_seconds);
    children.wait("warm-up", interrupt, |_| Instant::now() >= warm)?;
    let before = server.usage();
    children.tell(&Order::Measure)?;
    children.wait("measure", interrupt, |child| child.measured.is_some())?;
    let spent = before.zip(server.usage()).map(|(before, after)| after.since(&before));
    let measured: Option<Vec<(ThreadMeasurement, Environment)>> =
        children.all.iter_mut().map(|child| child.measured.take()).collect();
    let (worked, machines): (Vec<_>, Vec<_>) = measured.into_iter().flatten().unzip();
    let environment = machines.into_iter().next().unwrap_or_default();
    let worked = ThreadMeasurement::sum(worked).ok_or(Error::Panicked)?;
    Ok((worked, Supervised { server: spent, load_seconds, environment }))
}

/// A process and what it has told.
struct Process {
    child: Child,
    orders: Option<ChildStdin>,
    operations: u64,
    has_loaded: bool,
    measured: Option<(ThreadMeasurement, Environment)>,
}

struct Children {
    all: Vec<Process>,
    /// By child; `None` at its end.
    messages: Receiver<(usize, Option<Message>)>,
}

impl Children {
    fn start(args: &Ycsb) -> Result<Self> {
        let starting = || Error::system("starting another kv-bench");
        let program = std::env::current_exe().map_err(starting())?;
        let (sender, messages) = channel();
        let mut children = Self { all: Vec::new(), messages };
        for number in 0..args.processes {
            use std::os::unix::process::CommandExt;
            let mut child = Command::new(&program)
                .args(std::env::args_os().skip(1))
                .arg(format!("--process={number}"))
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                // Ctrl-C in a terminal is for us: we end our children.
                .process_group(0)
                .spawn()
                .map_err(starting())?;
            let (orders, output) = (child.stdin.take(), child.stdout.take());
            let (sender, number) = (sender.clone(), number as usize);
            if let Some(output) = output {
                let forward = move || forward(BufReader::new(output), number, &sender);
                thread::Builder::new().spawn(forward).map_err(starting())?;
            }
            let (operations, has_loaded, measured) = (0, false, None);
            children.all.push(Process { child, orders, operations, has_loaded, measured });
        }
        Ok(children)
    }

    fn tell(&mut self, order: &Order) -> Result<()> {
        let line = serde_json::to_string(order).map_err(|_| Error::Panicked)? + "\n";
        for orders in self.all.iter_mut().filter_map(|child| child.orders.as_mut()) {
            // A child that does not listen any more has told why, or has died: the next wait knows.
            let _ = orders.write_all(line.as_bytes());
        }
        Ok(())
    }

    /// Takes messages until the phase is over for all.
    fn wait(
        &mut self,
        phase: &str,
        interrupt: &Interrupt,
        is_over: impl Fn(&Process) -> bool,
    ) -> Result<()> {
        let line = ProgressLine::new();
        let operations = |all: &[Process]| all.iter().map(|child| child.operations).sum::<u64>();
        let (started, before) = (Instant::now(), operations(&self.all));
        while !self.all.iter().all(&is_over) {
            interrupt.check()?;
            match self.messages.recv_timeout(PAUSE) {
                Ok((number, message)) => self.take(number, message)?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(Error::Panicked),
            }
            let done = operations(&self.all) - before;
            let elapsed = started.elapsed();
            line.show(phase, done as f64 / elapsed.as_secs_f64(), elapsed);
        }
        Ok(())
    }

    fn take(&mut self, number: usize, message: Option<Message>) -> Result<()> {
        let process = &mut self.all[number];
        match message {
            Some(Message::Operations(operations)) => process.operations = operations,
            Some(Message::Loaded) => process.has_loaded = true,
            Some(Message::Measured { threads, environment }) => {
                process.measured = Some((*threads, environment));
            }
            Some(Message::Failed { said, code }) => {
                return Err(Error::Process { number, said, code });
            }
            None if process.measured.is_some() => {}
            None => {
                process.orders = None;
                let status = process.child.wait();
                let said = status.map_or_else(|error| error.to_string(), |how| how.to_string());
                return Err(Error::Process { number, said, code: exit_code::FAILED });
            }
        }
        Ok(())
    }
}

/// Passes on what a child says, line by line.
fn forward(output: impl BufRead, number: usize, sender: &Sender<(usize, Option<Message>)>) {
    let lines = output.lines().map_while(io::Result::ok);
    for message in lines.map_while(|line| serde_json::from_str(&line).ok()) {
        if sender.send((number, Some(message))).is_err() {
            return;
        }
    }
    // The receiver may be gone.
    let _ = sender.send((number, None));
}

impl Drop for Children {
    fn drop(&mut self) {
        for process in &mut self.all {
            process.orders = None;
        }
        let asked = Instant::now();
        for Process { child, .. } in &mut self.all {
            while let Ok(None) = child.try_wait() {
                if asked.elapsed() > END_TIMEOUT {
                    let _ = child.kill();
                    let _ = child.wait();
                    break;
                }
                thread::sleep(PAUSE);
            }
        }
    }
}

/// What a child hears from its parent, and tells it.
pub struct Parent {
    server: String,
    is_own: bool,
    /// How many of the later orders have come.
    orders: Arc<AtomicUsize>,
}

impl Parent {
    /// Listens from now on: to the first order here, to the others in a thread. The end of orders
    /// interrupts the run.
    pub fn listen(interrupt: &Interrupt) -> Result<Self> {
        let failed = || Error::system("listening to the kv-bench that started this one");
        let mut line = String::new();
        io::stdin().lock().read_line(&mut line).map_err(failed())?;
        let Ok(Order::Load { server, is_own }) = serde_json::from_str(&line) else {
            return Err(failed()(io::ErrorKind::InvalidData.into()));
        };
        let orders = Arc::new(AtomicUsize::new(0));
        let counted = (orders.clone(), interrupt.clone());
        let count = move || {
            let (orders, interrupt) = counted;
            for _ in io::stdin().lock().lines().map_while(io::Result::ok) {
                orders.fetch_add(1, Ordering::Release);
            }
            interrupt.raise();
        };
        thread::Builder::new().spawn(count).map_err(failed())?;
        Ok(Self { server, is_own, orders })
    }

    /// The server to go to, and whether it was started for the run.
    pub fn server(&self, config: ClientConfig) -> Server {
        Server::of_parent(config, &self.server, self.is_own)
    }

    /// Whether it is time to warm up.
    pub fn wants_warm_up(&self) -> bool {
        self.orders.load(Ordering::Acquire) >= 1
    }

    /// Whether it is time to measure.
    pub fn wants_measuring(&self) -> bool {
        self.orders.load(Ordering::Acquire) >= 2
    }

    /// All records of this process are loaded.
    pub fn has_loaded(&self) {
        say(&Message::Loaded);
    }

    /// So many operations are done.
    pub fn has_done(&self, operations: u64) {
        say(&Message::Operations(operations));
    }
}

/// A parent that is gone interrupts the run by other means.
fn say(message: &Message) {
    let line = serde_json::to_string(message).unwrap_or_default() + "\n";
    let _ = io::stdout().write_all(line.as_bytes());
}

/// Tells the parent what this process measured, or why it failed.
pub fn answer(measured: Result<(ThreadMeasurement, Supervised)>) {
    say(&match measured {
        Ok((threads, Supervised { environment, .. })) => {
            Message::Measured { threads: Box::new(threads), environment }
        }
        Err(error) => Message::Failed { said: one_line(&error), code: error.exit_code() },
    });
}
