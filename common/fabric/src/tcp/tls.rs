//! TLS 1.3 for the connections of `tcp://`. Without it a stream's bytes are those of its socket.

use std::io::{self, IoSlice, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{
    AlertDescription, CertificateError, ClientConfig, ClientConnection, Connection, RootCertStore,
    ServerConfig, ServerConnection,
};
use serde::Deserialize;

use super::stream;
use crate::trusted_path;

/// The bytes of a connection that one system call receives at most.
const RECEIVED_BYTES_MAX: usize = 64 << 10;
/// The bytes that may wait, encrypted, for room in the socket.
const UNSENT_BYTES_MAX: usize = 256 << 10;

/// The PEM files of one side, and whether it uses TLS at all: the table `[tls]` of a config file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TlsFiles {
    /// The certificate of this side, and those between it and the CA. A server needs one.
    pub certificate: Option<PathBuf>,
    /// The private key of this certificate.
    pub key: Option<PathBuf>,
    /// The certificates of the CAs that sign those of the other side. A client needs them. A server
    /// that has them accepts only clients with a certificate.
    pub ca: Option<PathBuf>,
}

/// Why a connection cannot be encrypted.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be used.
    #[error("cannot use the file {}: {why}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// The files do not suffice.
    #[error("{0}")]
    Incomplete(&'static str),
    /// The server's certificate is not valid.
    #[error("the server's certificate is not accepted: {0}")]
    Server(String),
    /// The server does not accept the client's certificate, or wants one.
    #[error("the server does not accept this client: {0}")]
    Client(String),
    /// Only one of the sides uses TLS.
    #[error("{0}")]
    OneSided(&'static str),
    /// Another failure of TLS.
    #[error("TLS failed: {0}")]
    Protocol(rustls::Error),
}

type Result<T> = std::result::Result<T, TlsError>;

const SERVER_HAS_NONE: &str = "the server does not use TLS: leave [tls] out of the client's \
    config, or give the server a certificate";
const SERVER_USES_TLS: &str = "the server uses TLS: set tls.ca in the client's config to the file \
    of the CA that signed the server's certificate";

/// The first two bytes of an alert, with which a server that uses TLS answers a client that does
/// not: the content type and the major version.
const ALERT_BEGIN: [u8; 2] = [0x15, 0x03];

impl TlsFiles {
    /// Whether this side uses TLS.
    pub fn is_used(&self) -> bool {
        *self != Self::default()
    }

    fn own(&self) -> Result<Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>> {
        match (&self.certificate, &self.key) {
            (None, None) => Ok(None),
            (Some(certificate), Some(key)) => {
                let certificates = certificates(certificate)?;
                let pem = trusted_path::read(key).map_err(unreadable(key))?;
                let key = PrivateKeyDer::from_pem_slice(&pem).map_err(unusable(key))?;
                Ok(Some((certificates, key)))
            }
            _ => Err(TlsError::Incomplete("tls.certificate and tls.key need each other: set both")),
        }
    }

    fn roots(&self) -> Result<Option<Arc<RootCertStore>>> {
        let Some(path) = &self.ca else { return Ok(None) };
        let mut roots = RootCertStore::empty();
        for certificate in certificates(path)? {
            let added = roots.add(certificate);
            added.map_err(|error| TlsError::File { path: path.clone(), why: error.to_string() })?;
        }
        Ok(Some(Arc::new(roots)))
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let pem = trusted_path::read(path).map_err(unreadable(path))?;
    let all = CertificateDer::pem_slice_iter(&pem);
    let all = all.collect::<std::result::Result<Vec<_>, _>>().map_err(unusable(path))?;
    match all.is_empty() {
        true => Err(unusable(path)(pem::Error::NoItemsFound)),
        false => Ok(all),
    }
}

fn unreadable(path: &Path) -> impl Fn(io::Error) -> TlsError {
    move |error| TlsError::File { path: path.to_owned(), why: error.to_string() }
}

fn unusable(path: &Path) -> impl Fn(pem::Error) -> TlsError {
    move |error| {
        let why = match error {
            pem::Error::NoItemsFound => "it has no certificate or key in PEM format".into(),
            error => error.to_string(),
        };
        TlsError::File { path: path.to_owned(), why }
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// A client's side of TLS, for the connections to one server.
#[derive(Clone)]
pub struct TlsClient {
    config: Arc<ClientConfig>,
    server: ServerName<'static>,
}

impl TlsClient {
    /// Reads the files. `host` is the name or IP address that the server's certificate must be for.
    ///
    /// # Errors
    /// [`TlsError`], if a file is missing or unusable.
    pub fn load(files: &TlsFiles, host: &str) -> Result<Self> {
        let roots = files.roots()?.ok_or(TlsError::Incomplete(
            "tls.ca is missing: set it to the file of the CA that signed the server's certificate",
        ))?;
        let config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(TlsError::Protocol)?
            .with_root_certificates(roots);
        let mut config = match files.own()? {
            Some((certificates, key)) => {
                let config = config.with_client_auth_cert(certificates, key);
                config.map_err(TlsError::Protocol)?
            }
            None => config.with_no_client_auth(),
        };
        config.resumption = rustls::client::Resumption::disabled();
        let server = ServerName::try_from(host.to_owned())
            .map_err(|_| TlsError::Server(format!("{host:?} is no name of a host")))?;
        Ok(Self { config: Arc::new(config), server })
    }

    pub(super) fn connection(&self) -> io::Result<Tls> {
        let connection = ClientConnection::new(self.config.clone(), self.server.clone());
        Ok(Tls::over(connection.map_err(io::Error::other)?.into()))
    }
}

/// A server's side of TLS.
pub struct TlsServer {
    files: TlsFiles,
    config: Mutex<Arc<ServerConfig>>,
}

impl TlsServer {
    /// Reads the files.
    ///
    /// # Errors
    /// [`TlsError`], if a file is missing or unusable.
    pub fn load(files: TlsFiles) -> Result<Self> {
        let config = Mutex::new(Self::config(&files)?);
        Ok(Self { files, config })
    }

    /// Reads the files again. The connections that exist keep what they began with.
    ///
    /// # Errors
    /// As [`TlsServer::load`]; then the former content stays in use.
    pub fn reload(&self) -> Result<()> {
        let config = Self::config(&self.files)?;
        *self.config.lock().unwrap_or_else(PoisonError::into_inner) = config;
        Ok(())
    }

    fn config(files: &TlsFiles) -> Result<Arc<ServerConfig>> {
        let (certificates, key) = files.own()?.ok_or(TlsError::Incomplete(
            "tls.certificate and tls.key are missing: a server needs both",
        ))?;
        let builder = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(TlsError::Protocol)?;
        let builder = match files.roots()? {
            Some(roots) => {
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider());
                let verifier = verifier.build().map_err(|error| TlsError::File {
                    path: files.ca.clone().unwrap_or_default(),
                    why: error.to_string(),
                })?;
                builder.with_client_cert_verifier(verifier)
            }
            None => builder.with_no_client_auth(),
        };
        let config = builder.with_single_cert(certificates, key);
        let mut config = config.map_err(|error| TlsError::File {
            path: files.certificate.clone().unwrap_or_default(),
            why: error.to_string(),
        })?;
        // No client resumes a connection.
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }

    /// The configuration for a new connection, for servers of other protocols.
    pub fn config_of_next(&self) -> Arc<ServerConfig> {
        self.config.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn connection(&self) -> io::Result<Tls> {
        let connection = ServerConnection::new(self.config_of_next());
        Ok(Tls::over(connection.map_err(io::Error::other)?.into()))
    }
}

/// The encryption of one connection.
pub(super) struct Tls {
    connection: Connection,
    /// Bytes that were received, and which of them are not decrypted yet. Without such bytes it may
    /// be empty.
    received: Vec<u8>,
    from: usize,
    to: usize,
    /// The number of decrypted bytes that were not taken yet.
    decrypted: usize,
}

impl Tls {
    fn over(mut connection: Connection) -> Self {
        connection.set_buffer_limit(Some(UNSENT_BYTES_MAX));
        Self { connection, received: Vec::new(), from: 0, to: 0, decrypted: 0 }
    }

    pub(super) fn is_handshaking(&self) -> bool {
        self.connection.is_handshaking()
    }

    /// Whether [`Tls::receive`] has bytes without a system call.
    pub(super) fn has_received(&self) -> bool {
        self.decrypted > 0 || self.from < self.to
    }

    /// Whether encrypted bytes wait for room in the socket.
    pub(super) fn has_unsent(&self) -> bool {
        self.connection.wants_write()
    }

    /// Takes decrypted bytes. Returns `None` if more bytes have to be received first. Without room
    /// in `into`, only the handshake goes on.
    ///
    /// # Errors
    /// `InvalidData` with a [`rustls::Error`] inside. The peer is told why.
    pub(super) fn take(&mut self, socket: &OwnedFd, into: &mut [u8]) -> io::Result<Option<usize>> {
        let mut taken = 0;
        loop {
            while self.decrypted > 0 && taken < into.len() {
                let bytes = self.connection.reader().read(&mut into[taken..])?;
                self.decrypted -= bytes;
                taken += bytes;
            }
            if self.from == self.to || taken == into.len() && !self.is_handshaking() {
                return Ok((taken > 0).then_some(taken));
            }
            let mut encrypted = &self.received[self.from..self.to];
            self.from += self.connection.read_tls(&mut encrypted)?;
            let state = self.connection.process_new_packets();
            // An answer of the handshake, or an alert. It waits if there is no room.
            let _ = self.flush(socket);
            let state = state.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            self.decrypted = state.plaintext_bytes_to_read();
            if state.peer_has_closed() && self.decrypted == 0 {
                return Ok(Some(taken));
            }
        }
    }

    /// Receives encrypted bytes, after [`Tls::take`] returned `None`. Returns their number.
    ///
    /// # Errors
    /// Those of [`stream::receive`].
    pub(super) fn fill(&mut self, socket: &OwnedFd, wait: bool) -> io::Result<usize> {
        if self.received.is_empty() {
            self.received.resize(RECEIVED_BYTES_MAX, 0);
        }
        let bytes = stream::receive(socket, &mut self.received, wait)?;
        (self.from, self.to) = (0, bytes);
        Ok(bytes)
    }

    /// Takes memory for encrypted bytes, if it has none.
    pub(super) fn borrow(&mut self, spare: &mut Vec<u8>) {
        if self.received.is_empty() {
            std::mem::swap(&mut self.received, spare);
        }
    }

    /// Gives the memory for encrypted bytes back, if there are none.
    pub(super) fn give_back(&mut self, spare: &mut Vec<u8>) {
        if self.from == self.to && !self.received.is_empty() {
            *spare = std::mem::take(&mut self.received);
        }
    }

    /// The memory for encrypted bytes: that for received ones, and what may be unsent.
    pub(super) fn kept_bytes(&self) -> usize {
        self.received.capacity() + if self.has_unsent() { UNSENT_BYTES_MAX } else { 0 }
    }

    /// Encrypts as many bytes of these parts as there is room for. Returns their number.
    ///
    /// # Errors
    /// `WouldBlock` without any room.
    pub(super) fn encrypt(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        match self.connection.writer().write_vectored(parts)? {
            0 => Err(io::ErrorKind::WouldBlock.into()),
            bytes => Ok(bytes),
        }
    }

    /// Sends encrypted bytes. Returns whether nothing is left.
    ///
    /// # Errors
    /// The system's error.
    pub(super) fn flush(&mut self, socket: &OwnedFd) -> io::Result<bool> {
        while self.connection.wants_write() {
            match self.connection.write_tls(&mut Sender(socket)) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Announces the end of this direction.
    pub(super) fn close(&mut self) {
        self.connection.send_close_notify();
    }
}

/// A socket, as a writer.
struct Sender<'s>(&'s OwnedFd);

impl Write for Sender<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        stream::send(self.0, parts)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether these bytes, instead of a message, are a server's answer to a client without TLS.
pub(super) fn is_alert(bytes: &[u8]) -> bool {
    bytes.starts_with(&ALERT_BEGIN)
}

/// The error of a client without TLS whose server uses it.
pub(super) fn server_uses_tls() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, TlsError::OneSided(SERVER_USES_TLS))
}

/// The error of a client whose server ended the connection within the handshake.
pub(super) fn no_handshake() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, TlsError::OneSided(SERVER_HAS_NONE))
}

impl TlsError {
    /// The failure of TLS in an error of a connection, if it is one.
    pub fn of(error: &io::Error) -> Option<Self> {
        let inner = error.get_ref()?;
        if let Some(error) = inner.downcast_ref::<Self>() {
            return Some(error.clone());
        }
        let error = inner.downcast_ref::<rustls::Error>()?;
        Some(match error {
            rustls::Error::InvalidCertificate(why) => Self::Server(certificate_text(why)),
            rustls::Error::InvalidMessage(_) => Self::OneSided(SERVER_HAS_NONE),
            rustls::Error::AlertReceived(AlertDescription::CertificateRequired) => Self::Client(
                "it wants a certificate: set tls.certificate and tls.key in the client's config"
                    .into(),
            ),
            rustls::Error::AlertReceived(alert) => {
                Self::Client(format!("it answered with the alert {alert:?}"))
            }
            other => Self::Protocol(other.clone()),
        })
    }
}

fn certificate_text(why: &CertificateError) -> String {
    match why {
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "no CA in the file of tls.ca has signed it: add the one that did".into()
        }
        other => other.to_string(),
    }
}
