//! The errors of a run.

use std::io;
use std::path::{Path, PathBuf};

use farside_cluster::{RecordError, StoreError};
use farside_config::command_line::exit_code;
use farside_control::ControlError;
use farside_control::attach::ConnectError;
use farside_fabric::ChainError;

/// Why a run failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum Error {
    /// The command line or a file it names asks for something impossible.
    #[error("{0}")]
    Usage(String),
    #[error(
        "found no kv-server in {} or in PATH: build it (cargo build --release) or name a \
         running one with --server",
        .beside.display()
    )]
    NoServerProgram { beside: PathBuf },
    #[error("{} did not start: {log}", .program.display())]
    ServerStart { program: PathBuf, log: String },
    #[error("{doing}: {source}")]
    Client {
        doing: &'static str,
        #[source]
        source: farside::Error,
    },
    #[error("connecting: {0}")]
    Setup(#[source] farside::SetupError),
    #[error("{doing}: {source}, or insert less with --operations or --target-rate")]
    NoRoom {
        doing: &'static str,
        #[source]
        source: farside::Error,
    },
    #[error("{doing}: {source}")]
    System {
        doing: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("cannot write {}: {source}", .path.display())]
    Output {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{}: {what}", .path.display())]
    Input { path: PathBuf, what: String },
    #[error("{store}: {why}")]
    Store { store: &'static str, why: String },
    #[error("cannot write the history {}: {source}", .path.display())]
    History {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Attach(#[from] ConnectError),
    #[error(transparent)]
    Records(#[from] StoreError),
    #[error("a record of the cluster is wrong: {0}")]
    Record(#[from] RecordError),
    #[error("the control channel broke: {0}")]
    Control(#[from] ControlError),
    #[error("a raw verb failed: {0}")]
    Chain(#[from] ChainError),
    #[error(
        "this run needs {asked} blocks of {bytes} bytes, and the server can spare {spare} of its \
         free ones: give a smaller --span"
    )]
    TooFewBlocks { asked: usize, bytes: u64, spare: usize },
    #[error(
        "the server stores values of up to {max} bytes, and this run has some of {bytes}: start it \
         with --value-bytes-max {bytes}, or ask for shorter --values"
    )]
    ValueTooLong { bytes: u64, max: u64 },
    #[error(
        "this run needs {needed_mib} MiB of blocks for values of {bytes} bytes, and the server has \
         {free_mib} MiB free: start it with --memory {memory_mib}MiB, or ask for shorter --values"
    )]
    TooLittleMemory { bytes: u64, needed_mib: u64, free_mib: u64, memory_mib: u64 },
    #[error("no operation ended: give the run more --seconds, or a higher rate")]
    NoOperations,
    #[error("a thread of the benchmark panicked")]
    Panicked,
    #[error("interrupted")]
    Interrupted,
}

impl Error {
    /// For `map_err`: a system call failed.
    pub fn system(doing: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { doing, source }
    }

    /// For `map_err`: an input file cannot be read, or has the wrong content.
    pub fn input<E: ToString>(path: &Path) -> impl FnOnce(E) -> Self {
        let path = path.to_owned();
        move |error| Self::Input { path, what: error.to_string() }
    }

    /// For `map_err`: a result file cannot be written.
    pub fn output(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Output { path, source }
    }

    /// For `map_err`: the client library returned an error.
    pub fn client(doing: &'static str) -> impl FnOnce(farside::Error) -> Self {
        move |source| Self::Client { doing, source }
    }

    /// The exit code of the process.
    pub fn exit_code(&self) -> u8 {
        match self {
            // What a shell reports for a program that SIGINT ended.
            Self::Interrupted => 130,
            Self::Usage(_) => exit_code::USAGE,
            Self::Client { source, .. } | Self::NoRoom { source, .. } => source.exit_code(),
            Self::Setup(error) => error.exit_code(),
            Self::Attach(error) => exit_code::of_connect(error),
            _ => exit_code::FAILED,
        }
    }
}

/// The result of the functions of this crate.
pub type Result<T> = std::result::Result<T, Error>;
