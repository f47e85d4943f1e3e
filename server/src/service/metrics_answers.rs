//! What the serving thread counts for the metrics, and its answers to the metrics thread.

use farside_control::{Refusal, Request, Role};
use farside_fabric::boot_time_ns;

use super::ControlService;
use super::client_connection::DisconnectReason;
use crate::cluster::Membership;
use crate::metrics::{LabelledCounts, MetricsQuestions, ServiceSnapshot};

/// What the serving thread counts for the metrics only, and its end of their questions.
pub(super) struct MetricsCounts {
    /// `None` without metrics.
    questions: Option<MetricsQuestions>,
    fences: LabelledCounts,
    messages: LabelledCounts,
    probes: u64,
    probe_failures: u64,
}

impl MetricsCounts {
    pub(super) fn new(questions: Option<MetricsQuestions>) -> Self {
        let (fences, messages) = (LabelledCounts::new(FENCES), LabelledCounts::new(MESSAGES));
        Self { questions, fences, messages, probes: 0, probe_failures: 0 }
    }

    pub(super) fn count_message(&mut self, request: &Request) {
        self.messages.count(message_label(request));
    }

    /// Counts a client that was fenced for this reason.
    pub(super) fn count_fence(&mut self, reason: &DisconnectReason) {
        if let Some(label) = fence_label(reason) {
            self.fences.count(label);
        }
        // The last answer to a probe was due: the device's, or over TCP the system's.
        self.probe_failures += u64::from(matches!(reason, DisconnectReason::HostSilent));
    }

    /// Counts the probes of one round, and the sessions that were dead since the round before.
    pub(super) fn count_probes(&mut self, (probes, dead): (u64, u64)) {
        self.probes += probes;
        self.probe_failures += dead;
    }
}

impl ControlService {
    /// Answers a question of the metrics thread.
    pub(super) fn answer_metrics(&mut self) {
        let snapshot = self.snapshot();
        if let Some(questions) = &self.counts.questions {
            questions.answer(snapshot);
        }
    }

    fn snapshot(&mut self) -> ServiceSnapshot {
        // A reader's statistics walk through the chunks at most ten times a second.
        let statistics = self.statistics(Role::Reader, boot_time_ns());
        let of_role = |role| {
            let roles = self.connections.iter().map(|(_, connection)| connection.role());
            roles.filter(|of| *of == Some(role)).count() as u64
        };
        let sessions = self.connections.iter().map(|(_, connection)| connection.data.len() as u64);
        ServiceSnapshot {
            statistics,
            clients_max: self.admission.clients.clients_max,
            readers: of_role(Role::Reader),
            writers: of_role(Role::Writer),
            sessions: sessions.sum(),
            fences: self.counts.fences.clone(),
            refusals: self.admission.refusals.clone(),
            messages: self.counts.messages.clone(),
            probes: self.counts.probes,
            probe_failures: self.counts.probe_failures,
            is_growth_blocked: self.keeper.is_growth_blocked(),
            evicts: self.keeper.evicts(),
            view: self.cluster.as_ref().and_then(Membership::own),
        }
    }
}

/// Makes the list of all labels of a type, and the function that returns the label of a value.
macro_rules! labels {
    ($labels:ident, $label_of:ident($of:ty): $($value:pat => $label:literal,)+) => {
        pub(super) const $labels: &[&str] = &[$($label),+];

        pub(super) fn $label_of(value: &$of) -> &'static str {
            match value {
                $($value => $label,)+
            }
        }
    };
}

labels! {
    MESSAGES, message_label(Request):
    Request::TakeBlocks { .. } => "take_blocks",
    Request::GiveBlocks { .. } => "give_blocks",
    Request::GiveHeads { .. } => "give_heads",
    Request::Held { .. } => "held",
    Request::Collect => "collect",
    Request::Split { .. } => "split",
    Request::Statistics => "statistics",
    Request::Expires => "expires",
    Request::Snapshot { .. } => "snapshot",
    Request::Alive { .. } => "alive",
    Request::Reads { .. } => "reads",
    Request::Samples { .. } => "samples",
    Request::Description(_) => "description",
    Request::Clients { .. } => "clients",
    Request::Kick { .. } => "kick",
    Request::Hot { .. } => "hot",
    Request::Heartbeat { .. } => "heartbeat",
    Request::Map => "map",
    Request::NewerMap { .. } => "newer_map",
    Request::Goodbye => "goodbye",
}

/// The labels of [`fence_label`].
const FENCES: &[&str] = &[
    "disconnected",
    "protocol_violation",
    "unreachable",
    "host_silent",
    "report_overdue",
    "process_silent",
    "clock_behind",
    "kicked",
];

/// `None` for the reasons for which no client is fenced.
fn fence_label(reason: &DisconnectReason) -> Option<&'static str> {
    match reason {
        DisconnectReason::Gone => Some("disconnected"),
        DisconnectReason::Broken(_) => Some("protocol_violation"),
        DisconnectReason::Unreachable(_) => Some("unreachable"),
        DisconnectReason::HostSilent => Some("host_silent"),
        DisconnectReason::ReportOverdue => Some("report_overdue"),
        DisconnectReason::ProcessSilent { .. } => Some("process_silent"),
        DisconnectReason::ClockBehind { .. } => Some("clock_behind"),
        DisconnectReason::Kicked => Some("kicked"),
        DisconnectReason::Goodbye
        | DisconnectReason::Refused(_)
        | DisconnectReason::Failed(_)
        | DisconnectReason::ProofOverdue
        | DisconnectReason::Crowded { .. }
        | DisconnectReason::CrowdedByMaps => None,
    }
}

labels! {
    REFUSALS, refusal_label(Refusal):
    Refusal::Version { .. } => "version",
    Refusal::Credentials => "credentials",
    Refusal::Full { .. } => "full",
    Refusal::Malformed { .. } => "malformed",
    Refusal::ShuttingDown => "shutting_down",
    Refusal::UnknownClient { .. } => "unknown_client",
    Refusal::Device => "device",
    Refusal::FullOfReaders { .. } => "full_of_readers",
    Refusal::FullForUser { .. } => "full_for_user",
    Refusal::TooManySessions { .. } => "too_many_sessions",
    Refusal::Clustered => "clustered",
    Refusal::NoCluster => "no_cluster",
    Refusal::Spare => "spare",
    Refusal::OtherView { .. } => "other_view",
    Refusal::Unconfirmed => "unconfirmed",
    Refusal::OldNonce { .. } => "old_nonce",
    Refusal::NoSecret => "no_secret",
    Refusal::OutOfDescriptors { .. } => "out_of_descriptors",
    _ => "unknown",
}

#[cfg(test)]
mod tests {
    use farside_control::{ClientDescription, ControlError, Versions};
    use farside_layout::SizeClass;

    use super::*;

    #[test]
    fn every_fence_and_refusal_has_a_label_of_the_list() {
        let error = || std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        let reasons = [
            DisconnectReason::Gone,
            DisconnectReason::broken(ControlError::NotFarside),
            DisconnectReason::Unreachable(error()),
            DisconnectReason::HostSilent,
            DisconnectReason::ReportOverdue,
            DisconnectReason::ProcessSilent { ms: 1 },
            DisconnectReason::ClockBehind { ms: 1 },
            DisconnectReason::Kicked,
        ];
        let mut counts = MetricsCounts::new(None);
        reasons.iter().for_each(|reason| counts.count_fence(reason));
        assert!(counts.fences.iter().all(|(_, count)| count == 1), "{:?}", counts.fences);
        assert_eq!(counts.probe_failures, 1);
        counts.count_fence(&DisconnectReason::Goodbye);
        assert_eq!(counts.fences.iter().map(|(_, count)| count).sum::<u64>(), 8);
        let mut refusals = LabelledCounts::new(REFUSALS);
        for refusal in [
            Refusal::Version { server: Versions::OWN, client: Versions::OWN },
            Refusal::Credentials,
            Refusal::OtherView { shard: 1, number: 1 },
            Refusal::Unknown { code: 99 },
        ] {
            refusals.count(refusal_label(&refusal));
        }
        assert_eq!(refusals.iter().map(|(_, count)| count).sum::<u64>(), 4);
    }

    #[test]
    fn every_message_has_a_label_of_the_list() {
        let class = SizeClass::EXTENT;
        let requests = [
            Request::TakeBlocks { class, count: 1 },
            Request::GiveBlocks { class, rested: true, blocks: Vec::new() },
            Request::GiveHeads { class, blocks: Vec::new() },
            Request::Held { collection: 1, last: true, blocks: Vec::new() },
            Request::Collect,
            Request::Split { directory_hash: 0, local_depth: 0 },
            Request::Statistics,
            Request::Expires,
            Request::Snapshot { permille: 0 },
            Request::Alive { clock_ns: 0 },
            Request::Reads { found: 0, absent: 0, blocks: Vec::new() },
            Request::Samples { blocks: Vec::new() },
            Request::Description(ClientDescription::default()),
            Request::Clients { from_id: 0 },
            Request::Kick { client_id: 1 },
            Request::Hot { for_ms: 0 },
            Request::Heartbeat { clock_ns: 0, operations: 0 },
            Request::Map,
            Request::NewerMap { map: Vec::new() },
            Request::Goodbye,
        ];
        let mut counts = MetricsCounts::new(None);
        requests.iter().for_each(|request| counts.count_message(request));
        assert!(counts.messages.iter().all(|(_, count)| count == 1), "{:?}", counts.messages);
    }
}
