//! The state that the sessions of a client share, and what a failure does to its connections.

use std::sync::Arc;
use std::time::Duration;

use farside_control::Role;
use farside_control::attach::ConnectOptions;
use farside_protocol::Failure;

use crate::cluster::Cluster;
use crate::connection::{ServerConnection, SessionOptions};
use crate::fetches::Fetches;
use crate::metrics::ClientMetrics;
use crate::reconnecting::ReconnectBudget;
use crate::shard_link::ShardLink;
use crate::{Contact, Error, OperationError, Result};

/// The state that all clones of a client and its sessions share.
pub(crate) struct ClientInner {
    /// In a cluster its address and the others are seeds.
    pub(crate) connect_options: ConnectOptions,
    pub(crate) options: SessionOptions,
    pub(crate) intercept: Option<farside_fabric::Intercept>,
    /// `None` for a server without a cluster.
    pub(crate) cluster: Option<Arc<Cluster>>,
    /// By the number of the shard.
    pub(crate) links: Box<[ShardLink]>,
    pub(crate) fetches: Fetches,
    /// `None` without the option.
    pub(crate) metrics: Option<Arc<ClientMetrics>>,
}

impl ClientInner {
    /// The server's address; in a cluster the seeds.
    pub(crate) fn server(&self) -> String {
        let ConnectOptions { address, others, .. } = &self.connect_options;
        match self.cluster {
            Some(_) => std::iter::once(address)
                .chain(others)
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join(","),
            None => address.to_string(),
        }
    }

    pub(crate) fn intercept(&self) -> Option<&farside_fabric::Intercept> {
        self.intercept.as_ref()
    }

    /// The number of lanes of a session's engine. In a cluster a pipeline needs one more.
    pub(crate) fn lanes(&self) -> u16 {
        self.options.lanes + u16::from(self.cluster.is_some())
    }

    /// The size of the location cache of each shard, in bytes.
    pub(crate) fn cache_bytes_of_shard(&self) -> usize {
        self.options.cache_bytes / self.links.len()
    }

    /// Returns the error for a failed operation; `None` if the connection is lost and the operation
    /// had no effect.
    ///
    /// Gives the connection up if it is lost or the operation's outcome is unknown. Then sessions
    /// reconnect. The server gets no goodbye, so it cleans up what the operation may have left.
    pub(crate) fn handle_failure(
        &self,
        shard: usize,
        connection: &ServerConnection,
        failure: Failure,
    ) -> Option<Error> {
        let error = match failure {
            Failure::Error(error) => Some((*error).into()),
            Failure::Lost(_) => None,
            Failure::NoAnswer(waited_ns) => {
                let waited = Duration::from_nanos(waited_ns);
                Some(self.unreachable(shard, Contact::Silent, waited))
            }
        };
        if matches!(error, None | Some(Error::Operation(OperationError::Indeterminate))) {
            connection.control.give_up();
        }
        error
    }

    /// The error of an operation that had no effect because its connection was lost.
    pub(crate) fn disconnected(&self, shard: usize) -> Error {
        let last = self.links[shard].connections.last();
        let server = last.map_or_else(|| self.server(), |connection| connection.server());
        Error::Disconnected { server }
    }

    /// Counts a loss of the connection. Returns the error once the budget is used up.
    pub(crate) fn count_loss(&self, shard: usize, budget: &mut ReconnectBudget) -> Result<()> {
        if budget.count_loss(self.connect_options.timeout) {
            return Ok(());
        }
        Err(self.unreachable(shard, Contact::Lost, budget.since_first_loss()))
    }

    pub(crate) fn role(&self) -> Role {
        self.connect_options.role
    }
}
