//! Clients, and how they connect.

use std::ffi::c_char;
use std::path::Path;
use std::time::Duration;

use client::{Client, ClientBuilder, ClientConfig, Role, TlsFiles};

use crate::error::{Failure, run_alone};
use crate::farside_status::{self, FARSIDE_OK};
use crate::fork::Process;
use crate::memory::{object, set, shared, text};

/// How a client connects.
pub struct farside_options {
    builder: ClientBuilder,
    tls: TlsFiles,
}

/// A connection to a server or a cluster. Any number of sessions share it.
pub struct farside_client {
    pub(crate) client: Client,
    pub(crate) process: Process,
}

/// Makes options with all defaults. Free them with farside_options_free().
#[unsafe(no_mangle)]
pub extern "C" fn farside_options_new() -> *mut farside_options {
    let (builder, tls) = (Client::builder(), TlsFiles::default());
    Box::into_raw(Box::new(farside_options { builder, tls }))
}

/// Frees options. NULL is allowed.
///
/// # Safety
/// `options` is from farside_options_new(), and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_options_free(options: *mut farside_options) {
    if !options.is_null() {
        // SAFETY: by the caller's promise.
        drop(unsafe { Box::from_raw(options) });
    }
}

/// Changes the builder of the options.
///
/// # Safety
/// As for [`object`].
unsafe fn change(
    options: *mut farside_options,
    change: impl FnOnce(ClientBuilder) -> ClientBuilder,
) -> Result<farside_status, Failure> {
    // SAFETY: by the caller's promise.
    let options = unsafe { object(options, "options") }?;
    options.builder = change(std::mem::take(&mut options.builder));
    Ok(FARSIDE_OK)
}

/// Sets the server's address, for example "shm:///run/farside/kv.sock". If the server has several,
/// or for a cluster, write commas between them.
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_options_server(
    options: *mut farside_options,
    server: *const c_char,
) -> farside_status {
    run_alone(|| {
        // SAFETY: by the caller's promise.
        let server = unsafe { text(server, "server") }?;
        // SAFETY: likewise.
        unsafe { change(options, |builder| builder.server(server)) }
    })
}

/// Sets the shared secret. The client then uses only servers with the same one, which prove it.
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_options_secret(
    options: *mut farside_options,
    secret: *const c_char,
) -> farside_status {
    run_alone(|| {
        // SAFETY: by the caller's promise.
        let secret = unsafe { text(secret, "secret") }?;
        // SAFETY: likewise.
        unsafe { change(options, |builder| builder.secret(secret)) }
    })
}

/// Makes the client a reader, which cannot change anything.
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_options_read_only(
    options: *mut farside_options,
) -> farside_status {
    // SAFETY: by the caller's promise.
    run_alone(|| unsafe { change(options, |builder| builder.role(Role::Reader)) })
}

/// Sets how many operations a pipeline can have in flight: 1 to 1024, 64 by default.
/// farside_connect() checks it.
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_options_pipeline_depth(
    options: *mut farside_options,
    depth: u16,
) -> farside_status {
    // SAFETY: by the caller's promise.
    run_alone(|| unsafe { change(options, |builder| builder.pipeline_depth(depth)) })
}

/// Sets the size of the location cache in bytes, 64 MiB by default. 0 switches it off.
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_options_cache_bytes(
    options: *mut farside_options,
    bytes: usize,
) -> farside_status {
    // SAFETY: by the caller's promise.
    run_alone(|| unsafe { change(options, |builder| builder.cache_bytes(bytes)) })
}

/// Sets the timeout for connecting in milliseconds, 3000 by default.
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_options_connect_timeout_ms(
    options: *mut farside_options,
    timeout_ms: u64,
) -> farside_status {
    let timeout = Duration::from_millis(timeout_ms);
    // SAFETY: by the caller's promise.
    run_alone(|| unsafe { change(options, |builder| builder.connect_timeout(timeout)) })
}

/// Sets the files for TLS: the CA of the server's certificate, and a certificate and a key if the
/// server wants them. Each may be NULL.
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_options_tls(
    options: *mut farside_options,
    ca: *const c_char,
    certificate: *const c_char,
    key: *const c_char,
) -> farside_status {
    run_alone(|| {
        // SAFETY: by the caller's promise.
        let file = |name, what| match unsafe { text(name, what) } {
            _ if name.is_null() => Ok(None),
            Ok(name) => Ok(Some(name.into())),
            Err(failure) => Err(failure),
        };
        let tls = TlsFiles {
            ca: file(ca, "ca")?,
            certificate: file(certificate, "certificate")?,
            key: file(key, "key")?,
        };
        // SAFETY: by the caller's promise.
        let options = unsafe { object(options, "options") }?;
        options.tls = tls;
        Ok(FARSIDE_OK)
    })
}

/// Takes all settings from a configuration file, as `config/client.toml` describes it.
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_options_file(
    options: *mut farside_options,
    path: *const c_char,
) -> farside_status {
    run_alone(|| {
        // SAFETY: by the caller's promise.
        let path = unsafe { text(path, "path") }?;
        let config = ClientConfig::load(Path::new(path));
        let config = config.map_err(|error| Failure::argument(&error.to_string()))?;
        // SAFETY: likewise.
        let options = unsafe { object(options, "options") }?;
        options.tls = config.tls.clone();
        options.builder = std::mem::take(&mut options.builder).config(&config);
        Ok(FARSIDE_OK)
    })
}

/// Connects to a server or a cluster. The options stay the caller's. Free the client with
/// farside_client_free().
///
/// # Safety
/// The arguments are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_connect(
    options: *const farside_options,
    client: *mut *mut farside_client,
) -> farside_status {
    run_alone(|| {
        // SAFETY: by the caller's promise.
        unsafe { set(client, "client", std::ptr::null_mut()) }?;
        // SAFETY: likewise.
        let options = unsafe { shared(options, "options") }?;
        let connected = options.builder.clone().tls(options.tls.clone()).connect()?;
        let connected = farside_client { client: connected, process: Process::this() };
        // SAFETY: likewise.
        unsafe { set(client, "client", Box::into_raw(Box::new(connected))) }?;
        Ok(FARSIDE_OK)
    })
}

/// Frees a client. NULL is allowed. Its sessions and buffers can still be used.
///
/// # Safety
/// `client` is from farside_connect(), and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn farside_client_free(client: *mut farside_client) {
    if client.is_null() {
        return;
    }
    // SAFETY: by the caller's promise.
    let client = unsafe { Box::from_raw(client) };
    run_alone(|| {
        let process = client.process;
        process.drop(*client);
        Ok(FARSIDE_OK)
    });
}
