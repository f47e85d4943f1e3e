//! The settings of a connection, from keyword arguments.

use std::path::PathBuf;

use farside::{Client, RdmaOptions, Role, TlsFiles};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::arguments::Seconds;
use crate::errors;
use crate::interrupts;

/// The variable of the environment with the server's address, as for `kv-cli`.
const SERVER_VARIABLE: &str = "FARSIDE_SERVER";

/// Connects, without the GIL.
pub(crate) fn connect(
    py: Python<'_>,
    server: Option<String>,
    settings: Option<&Bound<'_, PyDict>>,
) -> PyResult<Client> {
    let of_environment = || std::env::var(SERVER_VARIABLE).ok().filter(|server| !server.is_empty());
    let server = server.or_else(of_environment).ok_or_else(|| errors::no_address(py))?;
    let (mut rdma, mut tls) = (RdmaOptions::default(), TlsFiles::default());
    let mut builder = Client::builder().server(&server);
    for (name, value) in settings.into_iter().flatten() {
        if value.is_none() {
            continue;
        }
        let name = name.cast::<PyString>()?.to_str()?;
        match name {
            "role" => builder = builder.role(role(&value.extract::<String>()?)?),
            "secret" => builder = builder.secret(&value.extract::<String>()?),
            "cache_bytes" => builder = builder.cache_bytes(value.extract()?),
            "pipeline_depth" => builder = builder.pipeline_depth(value.extract()?),
            "connect_timeout" => {
                builder = builder.connect_timeout(value.extract::<Seconds>()?.0);
            }
            "metrics" => builder = builder.metrics(value.extract()?),
            "tls_ca" => tls.ca = Some(value.extract::<PathBuf>()?),
            "tls_certificate" => tls.certificate = Some(value.extract::<PathBuf>()?),
            "tls_key" => tls.key = Some(value.extract::<PathBuf>()?),
            "rdma_retry_count" => rdma.retry_count = value.extract()?,
            "rdma_ack_timeout" => rdma.ack_timeout = value.extract()?,
            "rdma_spin" => rdma.spin = value.extract::<Seconds>()?.0,
            _ => return Err(PyTypeError::new_err(format!("a client has no setting {name}"))),
        }
    }
    let builder = builder.rdma(rdma).tls(tls);
    interrupts::detach(py, errors::of_setup, || builder.connect())
}

fn role(name: &str) -> PyResult<Role> {
    match name {
        "reader" => Ok(Role::Reader),
        "writer" => Ok(Role::Writer),
        _ => Err(PyValueError::new_err(format!("role {name:?}: write \"reader\" or \"writer\""))),
    }
}
