//! `/health`: whether every daemon answers and holds content, and if not, which does not and why.

use super::probe::{Answer, Probed};
use serde_json::{Value, json};
use weightd_core::wire::message::Holds;

/// True where all is well, with the same in JSON.
pub fn report(probed: &Probed) -> (bool, Value) {
    let mut all_well = probed.notes.ready;
    let daemons = probed.notes.daemons.iter().enumerate().map(|(number, member)| {
        let (state, why) = match probed.daemons.get(number) {
            None => ("loading", Some("its weights are being loaded".to_owned())),
            Some(Err(why)) => ("unreachable", Some(why.clone())),
            Some(Ok(Answer { status, .. })) => state(&status.holds),
        };
        all_well &= why.is_none();
        json!({
            "rank": member.rank,
            "role": member.role,
            "socket": member.socket,
            "state": state,
            "why": why,
        })
    });
    let daemons: Vec<Value> = daemons.collect();
    let status = match (all_well, probed.notes.ready) {
        (true, _) => "ok",
        (false, true) => "unavailable",
        (false, false) => "starting",
    };
    (all_well, json!({ "status": status, "daemons": daemons }))
}

fn state(holds: &Holds) -> (&'static str, Option<String>) {
    match holds {
        Holds::Content(_) => ("serving", None),
        Holds::Empty => ("empty", Some("it holds no content".to_owned())),
        Holds::Released(generation) => ("released", Some(format!("generation {generation} was released"))),
        Holds::Lost(generation) => (
            "lost",
            Some(format!(
                "the device lost generation {generation}, which is being loaded afresh"
            )),
        ),
    }
}
