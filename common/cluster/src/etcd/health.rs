//! The state of etcd's members.

use std::time::{Duration, Instant};

use serde_json::json;

use super::gateway::{FREE_SPACE, Gateway, Repeat};
use super::wire::{Alarm, Alarms, Members, Status};
use crate::store::{Health, StoreError};

/// The longest time to ask one member, with a login.
const MEMBER_MAX: Duration = Duration::from_secs(2);

/// Looks at every member, and at the alarms.
pub(super) fn check(gateway: &Gateway) -> Vec<Health> {
    let mut found = Vec::new();
    let mut by_id = Vec::new();
    for (endpoint, subject) in gateway.endpoints().iter().enumerate() {
        let deadline = Instant::now() + MEMBER_MAX;
        let status = gateway.call_one(endpoint, "maintenance/status", &json!({}), deadline);
        let problem = match status {
            Ok(status) => {
                by_id.push((Status::id(&status), subject.clone()));
                status.problem()
            }
            Err(failure) => Some(match gateway.unexpected(failure) {
                StoreError::Unreachable { why, .. } => {
                    format!("{why}; start this member, or replace it in etcd and in the URI")
                }
                error => error.to_string(),
            }),
        };
        found.push(Health { subject: subject.clone(), problem });
    }
    if by_id.is_empty() {
        return found;
    }
    let name = |id: u64| {
        let known = by_id.iter().find(|(known, _)| *known == id);
        known.map_or_else(|| format!("member {id:x}"), |(_, subject)| subject.clone())
    };
    match gateway.call("maintenance/alarm", &json!({ "action": "GET" }), Repeat::Harmless) {
        Ok(Alarms { alarms }) => {
            found.extend(alarms.iter().map(|alarm| Health {
                subject: name(alarm.member),
                problem: Some(alarm.problem()),
            }))
        }
        Err(failure) => found.push(Health {
            subject: "the alarms".to_owned(),
            problem: Some(gateway.unexpected(failure).to_string()),
        }),
    }
    found.extend(unlisted(gateway, &by_id));
    found
}

/// The members that the URI leaves out. It is not known which they are while one does not answer.
fn unlisted(gateway: &Gateway, by_id: &[(u64, String)]) -> Vec<Health> {
    if by_id.len() < gateway.endpoints().len() {
        return Vec::new();
    }
    let body = json!({});
    let Ok(Members { members, .. }) = gateway.call("cluster/member/list", &body, Repeat::Harmless)
    else {
        return Vec::new();
    };
    let is_left_out = |id: u64| !by_id.iter().any(|(known, _)| *known == id);
    let left_out = members.into_iter().filter(|member| is_left_out(member.id));
    let problem = "the URI leaves this member of etcd out; add its HOST:PORT, so that the records \
        can be reached without the others";
    left_out
        .map(|member| Health { subject: member.name, problem: Some(problem.to_owned()) })
        .collect()
}

impl Status {
    fn id(&self) -> u64 {
        self.header.member_id
    }

    fn problem(&self) -> Option<String> {
        let mut parts = self.version.split('.').map(|part| part.parse::<u32>().ok());
        let version = (parts.next().flatten(), parts.next().flatten());
        if !matches!(version, (Some(3), Some(4..=6))) {
            let version = &self.version;
            return Some(format!("it has version {version:?}; use etcd 3.4, 3.5 or 3.6"));
        }
        let why = "it has no leader; start enough members that more than half of them run, and \
            check the network between them";
        (self.leader == 0).then(|| why.to_owned())
    }
}

impl Alarm {
    fn problem(&self) -> String {
        match self.alarm.as_str() {
            "NOSPACE" => format!("it has no space; {FREE_SPACE}"),
            "CORRUPT" => "its data is corrupt; remove this member from etcd, delete its data, and \
                add it again"
                .to_owned(),
            other => format!("it has the alarm {other:?}; see etcd's manual"),
        }
    }
}
