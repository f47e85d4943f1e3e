//! A run by several processes, as many clients on many machines would make it.
//!
//! kv-bench starts itself once for each process, with the same command line and the number of the
//! process. The parent writes orders to a child's stdin: which server to use, when to warm up, when
//! to measure. The child writes messages to its stdout: how far it is, and what it measured. Both
//! are JSON objects, one a line. When its stdin ends, the parent is gone, and the child ends.

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
use crate::environment::Machine;
use crate::progress::ProgressLine;
use crate::server::Server;
use crate::thread_measurement::{RunFacts, ThreadMeasurement};
use crate::{Error, Result};

/// A line from a parent to its child.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Order {
    Load { server: String, is_own: bool },
    WarmUp,
    Measure,
}

/// A line from a child to its parent.
#[derive(Serialize, Deserialize)]
enum Message {
    /// The number of operations so far, in all phases.
    Operations(u64),
    Loaded,
    Measured {
        threads: Box<ThreadMeasurement>,
        machine: Machine,
    },
    Failed {
        error: String,
        exit_code: u8,
    },
}

/// How long children may take to end by themselves. After that they are killed.
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause between two checks whether a process has ended.
const PAUSE: Duration = Duration::from_millis(5);

/// Runs a workload with `--processes` processes. Returns the sums of their measurements.
pub fn run(
    args: &Ycsb,
    server: &Server,
    interrupt: &Interrupt,
) -> Result<(ThreadMeasurement, RunFacts)> {
    let mut children = Children::start(args)?;
    let load = Instant::now();
    children.tell(&Order::Load { server: server.address().to_owned(), is_own: server.is_own() });
    children.wait("load", interrupt, |child| child.has_loaded)?;
    let load_seconds = load.elapsed().as_secs_f64();
    children.tell(&Order::WarmUp);
    let warm = Instant::now() + Duration::from_secs_f64(args.warmup_seconds);
    children.wait("warm-up", interrupt, |_| Instant::now() >= warm)?;
    let before = server.usage();
    children.tell(&Order::Measure);
    children.wait("measure", interrupt, |child| child.measured.is_some())?;
    let spent = before.zip(server.usage()).map(|(before, after)| after.since(&before));
    let measured = children.all.iter_mut().filter_map(|child| child.measured.take());
    let (threads, machines): (Vec<_>, Vec<_>) = measured.unzip();
    let machine = machines.into_iter().next().unwrap_or_default();
    let threads = ThreadMeasurement::sum(threads).ok_or(Error::NoProcessResult)?;
    Ok((threads, RunFacts { server: spent, load_seconds, machine }))
}

/// A child process, and what its messages said so far.
struct Process {
    child: Child,
    orders: Option<ChildStdin>,
    operations: u64,
    has_loaded: bool,
    measured: Option<(ThreadMeasurement, Machine)>,
}

struct Children {
    all: Vec<Process>,
    /// The number of the child with its message; `None` when its stdout ends.
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
                // Ctrl-C in a terminal reaches only us, and we end our children in order.
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

    fn tell(&mut self, order: &Order) {
        let line = line_of(order);
        for orders in self.all.iter_mut().filter_map(|child| child.orders.as_mut()) {
            // A child that no longer reads has sent its error or has died: the next wait reports
            // it.
            let _ = orders.write_all(line.as_bytes());
        }
    }

    /// Takes messages until the phase is over for all children.
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
                Err(RecvTimeoutError::Disconnected) => return Err(Error::NoProcessResult),
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
            Some(Message::Measured { threads, machine }) => {
                process.measured = Some((*threads, machine));
            }
            Some(Message::Failed { error, exit_code }) => {
                return Err(Error::Process { number, error, exit_code });
            }
            None if process.measured.is_some() => {}
            None => {
                process.orders = None;
                let status = process.child.wait();
                let error = status.map_or_else(|error| error.to_string(), |how| how.to_string());
                return Err(Error::Process { number, error, exit_code: exit_code::FAILED });
            }
        }
        Ok(())
    }
}

/// Passes the messages of a child on, and `None` at their end.
fn forward(output: impl BufRead, number: usize, sender: &Sender<(usize, Option<Message>)>) {
    let lines = output.lines().map_while(io::Result::ok);
    for message in lines.map_while(|line| serde_json::from_str(&line).ok()) {
        if sender.send((number, Some(message))).is_err() {
            return;
        }
    }
    // This fails if the receiver is gone, and then nothing waits for it.
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

/// The parent, as a child sees it: its orders, and the way to send it messages.
pub struct Parent {
    server: String,
    is_own: bool,
    /// How many orders have arrived after the first one.
    orders: Arc<AtomicUsize>,
}

impl Parent {
    /// Waits for the first order, and starts a thread that counts the others. The end of stdin
    /// interrupts the run.
    pub fn listen(interrupt: &Interrupt) -> Result<Self> {
        let failed = || Error::system("reading from the kv-bench that started this one");
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

    /// The server to use.
    pub fn server(&self, config: ClientConfig) -> Server {
        Server::of_parent(config, &self.server, self.is_own)
    }

    /// Whether the order to warm up has arrived.
    pub fn wants_warm_up(&self) -> bool {
        self.orders.load(Ordering::Acquire) >= 1
    }

    /// Whether the order to measure has arrived.
    pub fn wants_measuring(&self) -> bool {
        self.orders.load(Ordering::Acquire) >= 2
    }

    /// Tells that all records of this process are loaded.
    pub fn tell_loaded(&self) {
        send(&Message::Loaded);
    }

    /// Tells how many operations are done so far.
    pub fn tell_operations(&self, operations: u64) {
        send(&Message::Operations(operations));
    }
}

/// A message or an order as a line of JSON.
fn line_of(message: &impl Serialize) -> String {
    serde_json::to_string(message).unwrap_or_default() + "\n"
}

/// Sends a message to the parent. Errors are ignored: if the parent is gone, the end of stdin
/// interrupts the run.
fn send(message: &Message) {
    let _ = io::stdout().write_all(line_of(message).as_bytes());
}

/// Tells the parent what this process measured, or why it failed.
pub fn tell_result(measured: Result<(ThreadMeasurement, RunFacts)>) {
    send(&match measured {
        Ok((threads, RunFacts { machine, .. })) => {
            Message::Measured { threads: Box::new(threads), machine }
        }
        Err(error) => Message::Failed { error: one_line(&error), exit_code: error.exit_code() },
    });
}
