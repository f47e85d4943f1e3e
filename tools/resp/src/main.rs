//! kv-resp: a gateway for the clients of redis. It speaks their protocol, and is itself a client of
//! the store.
//!
//! The main thread accepts connections and gives them to the workers in turn. Workers serve
//! them (`worker.rs`); `executor.rs` turns requests into operations, `commands` has the commands.
#![deny(unsafe_code)]

mod args;
mod commands;
mod connection;
mod executor;
mod gateway;
mod helper;
mod lanes;
mod listen;
mod stream;
mod worker;

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use anyhow::Context;
use clap::{CommandFactory, Parser};
use farside::{Client, Error, SetupError, TlsFiles};
use farside_config::command_line::{exit_code, one_line, usage_line};
use farside_config::generate::generate;
use farside_config::{
    ClientConfig, ConfigError, LogLevel, MetricsAddress, check_private, logging, signals,
};
use farside_fabric::tcp::{TlsError, TlsServer};
use farside_metrics::{MetricsListener, why_not_bound};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::{SIGHUP, SIGXFSZ};
use signal_hook::iterator::Signals;

use args::Args;
use gateway::{Gateway, Settings};
use listen::{Accepted, Listener};
use worker::{Arrival, Worker, WorkerHandle};

/// The environment variable with the password of clients.
const PASSWORD_VARIABLE: &str = "FARSIDE_RESP_PASSWORD";
/// Descriptors that are not for connections of clients.
const DESCRIPTORS_KEPT: usize = 64;
/// How long the gateway waits when it cannot accept a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

fn main() -> ExitCode {
    if let Some(code) = generate(Args::command) {
        return code;
    }
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) if error.use_stderr() => {
            report(&usage_line("kv-resp", &error.to_string()));
            return exit_code::USAGE.into();
        }
        // --help or --version: prints and exits.
        Err(error) => error.exit(),
    };
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report(&one_line(error.as_ref()));
            code_of(&error).into()
        }
    }
}

/// The exit code for an error.
fn code_of(error: &anyhow::Error) -> u8 {
    if error.is::<Usage>() || error.is::<ConfigError>() || error.is::<TlsError>() {
        exit_code::USAGE
    } else if let Some(error) = error.downcast_ref::<SetupError>() {
        error.exit_code()
    } else {
        error.downcast_ref::<Error>().map_or(exit_code::FAILED, Error::exit_code)
    }
}

/// A mistake on the command line, or in a file that it names.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Usage(String);

fn run(args: Args) -> anyhow::Result<()> {
    raise_descriptor_limit();
    let _log = logging::start(args.log_format, LogLevel::Info).context("cannot log")?;
    let config = configure(&args)?;
    let password = password(&args)?;
    check_openness(&args, password.is_some())?;
    let files = TlsFiles {
        certificate: args.tls_certificate.clone(),
        key: args.tls_key.clone(),
        ca: args.tls_ca.clone(),
    };
    let tls = if files.is_used() { Some(TlsServer::load(files)?) } else { None };
    let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
    let signals = register_signals(tls.is_some()).context("cannot wait for signals")?;

    let metrics = args.metrics.map(bind_metrics).transpose()?;
    let builder = Client::builder().config(&config).pipeline_depth(args.depth);
    let client = builder.metrics(metrics.is_some()).connect()?;
    let measured = client.clone();
    let metrics =
        metrics.map(|listener| listener.serve(move |format| measured.render_metrics(format)));
    let _metrics = metrics.transpose().context("cannot start the thread for metrics")?;
    let threads = usize::from(args.threads);
    let sessions = (0..threads).map(|_| client.session()).collect::<Result<Vec<_>, _>>()?;
    let limits = sessions.first().map(|session| session.limits()).unwrap_or_default();
    let server = config.server.unwrap_or_default();
    let clients_max = clients_max(args.clients_max);
    let idle_s_max = args.idle_timeout;
    let settings = Settings { server, password, tls, threads, clients_max, idle_s_max };
    let gateway = Arc::new(Gateway::new(client, limits, settings));
    let mut listeners = Vec::new();
    for address in &args.listen {
        listeners.extend(Listener::bind(address)?);
    }
    watch_signals(signals, gateway.clone(), stop.clone());

    let (mut handles, mut workers) = (Vec::new(), Vec::new());
    for (number, session) in sessions.into_iter().enumerate() {
        let worker = Worker::new(gateway.clone())?;
        handles.push(worker.handle());
        let thread = thread::Builder::new().name(format!("resp-{number}"));
        let stop = StopOnDrop(stop.clone());
        workers.push(thread.spawn(move || {
            let _stop = stop;
            worker.run(session)
        })?);
    }
    for address in &args.listen {
        tracing::info!("serving {} at {address}", gateway.server);
    }
    let accepted = accept_connections(&gateway, &listeners, &handles, &stop);
    gateway.is_stopping.store(true, Ordering::Relaxed);
    handles.iter().for_each(WorkerHandle::wake);
    for worker in workers {
        let ended = worker.join().map_err(|_| anyhow::anyhow!("a thread has panicked"))?;
        ended.context("epoll failed")?;
    }
    accepted
}

/// Binds the address at which metrics are served.
fn bind_metrics(MetricsAddress(address): MetricsAddress) -> anyhow::Result<MetricsListener> {
    MetricsListener::bind(address).map_err(|error| {
        anyhow::anyhow!("cannot serve metrics at {address}: {}", why_not_bound(&error))
    })
}

/// Ends the gateway when a worker ends, also by a panic.
struct StopOnDrop(Arc<OwnedFd>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        // It fails only if it was written very often.
        let _ = rustix::io::write(&*self.0, &1_u64.to_ne_bytes());
    }
}

/// Accepts connections until the gateway is told to stop.
fn accept_connections(
    gateway: &Gateway,
    listeners: &[Listener],
    workers: &[WorkerHandle],
    stop: &OwnedFd,
) -> anyhow::Result<()> {
    let mut turn = 0;
    loop {
        let mut watched: Vec<_> =
            listeners.iter().map(|listener| PollFd::new(listener, PollFlags::IN)).collect();
        watched.push(PollFd::new(stop, PollFlags::IN));
        match poll(&mut watched, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("cannot wait for connections"),
        }
        let ready: Vec<bool> =
            watched.iter().map(|watched| !watched.revents().is_empty()).collect();
        if ready.last() == Some(&true) {
            return Ok(());
        }
        for (listener, _) in listeners.iter().zip(ready).filter(|(_, is_ready)| *is_ready) {
            match listener.accept() {
                Ok(accepted) => {
                    admit(gateway, accepted, workers, turn % workers.len());
                    turn += 1;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    tracing::warn!("FS-063 cannot accept a connection: {error}");
                    thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    }
}

/// Makes an accepted connection one of a worker's, unless there are too many.
fn admit(gateway: &Gateway, accepted: Accepted, workers: &[WorkerHandle], worker: usize) {
    let Some((record, replaced)) = gateway.admit(&accepted, worker) else {
        // The client may be gone.
        let _ = rustix::io::write(&accepted.socket, b"-ERR max number of clients reached\r\n");
        return;
    };
    if let Some(replaced) = replaced {
        workers[replaced.worker].close(replaced);
    }
    let uses_tls = accepted.host.is_some() && gateway.tls.is_some();
    workers[worker].give(Arrival { socket: accepted.socket, record, uses_tls });
}

/// Refuses addresses that other hosts may reach if clients need neither a password nor a
/// certificate, unless the command line asks for that.
fn check_openness(args: &Args, needs_password: bool) -> anyhow::Result<()> {
    if needs_password || args.tls_ca.is_some() {
        return Ok(());
    }
    for address in &args.listen {
        if !address.is_open()? {
            continue;
        }
        if !args.no_password {
            return Err(Usage(format!(
                "at {address} every host that reaches it could read and change all keys: give \
                 --password-file, or --tls-ca, or an address of this host alone such as \
                 tcp://127.0.0.1:6379, or --no-password if that is wanted"
            ))
            .into());
        }
        tracing::warn!(
            "FS-067 every host that reaches {address} can read and change all keys: clients need \
             neither a password nor a certificate"
        );
    }
    Ok(())
}

/// Returns the settings of the client, with the server of the command line if it names one.
fn configure(args: &Args) -> anyhow::Result<ClientConfig> {
    let mut config = match ClientConfig::file(args.config.as_deref()) {
        Some(path) => {
            let config = ClientConfig::load(&path)?;
            if config.secret.is_some() {
                check_exposure(&path, args.strict_config)?;
            }
            config
        }
        None => ClientConfig::default(),
    };
    if let Some(server) = args.server.as_ref().filter(|server| !server.is_empty()) {
        config.server = Some(server.clone());
    }
    if config.server.is_none() {
        return Err(Usage(
            "which server? Give --server shm:///path/of/kv.sock, set FARSIDE_SERVER, or write \
             `server = \"...\"` into ~/.config/farside/client.toml"
                .into(),
        )
        .into());
    }
    Ok(config)
}

/// Warns if other users can read a file with a secret; fails if `strict`.
fn check_exposure(path: &Path, strict: bool) -> anyhow::Result<()> {
    match check_private(path) {
        Err(exposed) if strict => Err(exposed.into()),
        Err(exposed) => {
            tracing::warn!("FS-001 {exposed}");
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

/// Returns the password of clients, if they need one.
fn password(args: &Args) -> anyhow::Result<Option<Vec<u8>>> {
    let Some(path) = &args.password_file else {
        let password = std::env::var(PASSWORD_VARIABLE).ok();
        return Ok(password.filter(|password| !password.is_empty()).map(String::into_bytes));
    };
    let mut password = farside_fabric::trusted_path::read(path).map_err(|error| {
        Usage(format!("cannot read the password file {}: {error}", path.display()))
    })?;
    check_exposure(path, args.strict_config)?;
    if password.ends_with(b"\n") {
        password.pop();
    }
    if password.is_empty() {
        return Err(Usage(format!("the password file {} is empty", path.display())).into());
    }
    Ok(Some(password))
}

/// Lets the gateway have as many descriptors as the system allows: each connection takes one.
fn raise_descriptor_limit() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // If this fails, the gateway runs out of descriptors sooner, and says so.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

/// The most connections, as far as the system has descriptors for them.
fn clients_max(wanted: usize) -> usize {
    let Some(descriptors) = getrlimit(Resource::Nofile).current else { return wanted };
    let possible = (descriptors as usize).saturating_sub(DESCRIPTORS_KEPT).max(1);
    if possible < wanted {
        tracing::warn!(
            "FS-064 the system allows {descriptors} descriptors: at most {possible} connections \
             instead of {wanted}; raise `ulimit -n` for more"
        );
    }
    wanted.min(possible)
}

/// Registers the signals that end the gateway. With TLS also SIGHUP.
fn register_signals(uses_tls: bool) -> io::Result<Signals> {
    signal_hook::flag::register(SIGXFSZ, Arc::default())?;
    signals::explain_bus_errors("kv-resp")?;
    let mut wanted = signals::ending();
    if uses_tls && !wanted.contains(&SIGHUP) {
        wanted.push(SIGHUP);
    }
    Signals::new(wanted)
}

/// Waits for signals on a thread of its own.
fn watch_signals(mut signals: Signals, gateway: Arc<Gateway>, stop: Arc<OwnedFd>) {
    thread::spawn(move || {
        for signal in signals.forever() {
            let Some(tls) = gateway.tls.as_ref().filter(|_| signal == SIGHUP) else { break };
            match tls.reload() {
                Ok(()) => tracing::info!("FS-005 read the files of TLS again"),
                Err(error) => {
                    tracing::error!("FS-006 {error}; the former certificate stays in use")
                }
            }
        }
        // Nothing else is ever written to it, so there is room.
        let _ = rustix::io::write(&*stop, &1_u64.to_ne_bytes());
    });
}

fn report(line: &str) {
    logging::report("kv-resp", line);
}
