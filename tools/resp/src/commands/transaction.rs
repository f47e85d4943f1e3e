//! MULTI, EXEC and DISCARD. There are no transactions, so nothing between MULTI and EXEC is
//! executed.
//!
//! MULTI itself succeeds. Most clients send a whole transaction at once, and all of them send EXEC
//! or DISCARD at its end only if MULTI has succeeded. If it failed, the gateway could not know
//! which of the commands behind it belong to the transaction.

use super::arguments::Arguments;
use super::client_state::ClientState;
use super::error;

const REFUSED: &str = "ERR there are no transactions here, so this command between MULTI and EXEC \
    was not executed: send it without MULTI";
const ABORTED: &str = "EXECABORT Transaction discarded: there are no transactions here, and none \
    of its commands was executed";

/// The reply of one of the three commands, and of any other between MULTI and EXEC: a simple string
/// or an error. `None` if the command is to be executed.
pub(crate) fn reply(
    arguments: &impl Arguments,
    state: &mut ClientState,
) -> Option<Result<&'static str, String>> {
    let is_open = state.is_in_transaction;
    let named = ["multi", "exec", "discard"].into_iter().find(|name| arguments.is(0, name));
    let Some(name) = named else {
        let leaves = arguments.is(0, "quit") || arguments.is(0, "reset");
        return (is_open && !leaves).then(|| Err(REFUSED.to_owned()));
    };
    Some(match name {
        _ if !state.is_authenticated => Err(error::NO_AUTH.to_owned()),
        _ if arguments.count() != 1 => Err(error::wrong_arity(name)),
        "multi" if is_open => Err("ERR MULTI calls can not be nested".to_owned()),
        "exec" | "discard" if !is_open => Err(format!("ERR {} without MULTI", name.to_uppercase())),
        _ => {
            state.is_in_transaction = name == "multi";
            if name == "exec" { Err(ABORTED.to_owned()) } else { Ok("OK") }
        }
    })
}
