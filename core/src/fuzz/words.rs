//! What hosts and strangers say: messages that fit one another now and then, and the descriptors that go with them.

use super::Input;
use crate::content::{Difference, Generation, HandleKind, Key};
use crate::peer::{Facts, FileKind};
use crate::testing::ledger::{Fd, Ledger};
use crate::testing::world::{EPOCH, content, device, info, key, place, publishable};
use crate::wire::Message;
use crate::wire::message::{
    Adopt, Adopted, ContentInfo, Control, DaemonId, Define, Defined, Digest, Expects, Failure, GetActivity,
    GetMemory, GetState, GetStatus, Holds, Lead, Leading, Lost, Memory, Mismatch, NeedDigest, Publish,
    Published, Release, Released, Report, Reported, State, Stop, Stopping, Watch, Watching,
};

/// Daemons are few, so that one is meant again.
pub const DAEMONS: usize = 3;

pub fn daemon(input: &mut Input<'_>) -> DaemonId {
    input.below(DAEMONS) as DaemonId
}

pub fn generation(input: &mut Input<'_>) -> Generation {
    Generation {
        epoch: EPOCH,
        number: 1 + input.below(4) as u64,
    }
}

fn some_generation(input: &mut Input<'_>) -> Option<Generation> {
    input.flag().then(|| generation(input))
}

pub fn some_key(input: &mut Input<'_>, daemon: DaemonId) -> Key {
    let mut key = match input.below(8) {
        0 => key(daemon + 1),
        1 => place(daemon),
        _ => key(daemon),
    };
    match input.below(8) {
        0 => key.checkpoint.digest = Some([9; 32]),
        1 => key.checkpoint.files = Some([2; 32]),
        2 => key.extra = [("x".repeat(input.short() as usize), String::new())].into(),
        _ => {}
    }
    key
}

pub fn some_content(input: &mut Input<'_>) -> ContentInfo {
    let regions: Vec<u64> = match input.below(8) {
        0 => vec![1; 14 + input.below(3)],
        more => vec![10 * more as u64; input.below(3)],
    };
    let mut content = content(64, &regions);
    let kinds = [HandleKind::Memfd, HandleKind::CudaFd, HandleKind::CudaIpc];
    for region in &mut content.regions {
        region.handle = kinds[input.below(16).saturating_sub(13)];
    }
    content
}

fn expects(input: &mut Input<'_>) -> Expects {
    some_generation(input).map_or(Expects::Empty, Expects::Generation)
}

fn define(input: &mut Input<'_>) -> Define {
    let daemon = daemon(input);
    let info = if input.flag() {
        publishable(daemon)
    } else {
        info(daemon, input.below(8) == 7)
    };
    let generation = generation(input);
    let holds = [
        Holds::Empty,
        Holds::Content(generation),
        Holds::Released(generation),
        Holds::Lost(generation),
    ];
    Define {
        daemon,
        info,
        holds: input.one_of(&holds),
    }
}

/// Anything that may be said to a server.
pub fn to_server(input: &mut Input<'_>) -> Message {
    let on = daemon(input);
    match input.below(22) {
        0 => GetState {
            key: some_key(input, on),
            is_reload: input.flag(),
        }
        .into(),
        1 => Watch {
            generation: some_generation(input),
        }
        .into(),
        2 => GetMemory {}.into(),
        3 => Release {
            daemon: on,
            generation: some_generation(input),
        }
        .into(),
        4 | 5 => Publish {
            daemon: on,
            generation: some_generation(input),
            expects: expects(input),
            key: some_key(input, on),
            content: some_content(input),
        }
        .into(),
        6 => Report {
            daemon: on,
            generation: generation(input),
            import_failed: "x".repeat(input.short() as usize % 5000),
        }
        .into(),
        7 => GetStatus {}.into(),
        8 => GetActivity {}.into(),
        9 => Lead { pid: 10 }.into(),
        10 | 11 => define(input).into(),
        12 => Digest {
            daemon: on,
            digest: [9; 32],
        }
        .into(),
        13 => Stop {}.into(),
        14 => Lost {
            daemon: on,
            generation: generation(input),
        }
        .into(),
        15 => Adopt { pid: 11 }.into(),
        16 => Control {
            names_stay: input.flag(),
        }
        .into(),
        17 => Published {
            daemon: on,
            generation: generation(input),
        }
        .into(),
        18 => Released {}.into(),
        19 => Reported {}.into(),
        20 => failure(input).into(),
        _ => to_engine(input),
    }
}

/// Anything that a daemon may say to an engine.
pub fn to_engine(input: &mut Input<'_>) -> Message {
    let on = daemon(input);
    match input.below(14) {
        0..=3 => State {
            generation: generation(input),
            device_uuid: device(input.below(2) as u8),
            content: some_content(input),
        }
        .into(),
        4 => Mismatch {
            fields: vec![Difference::new("dtype", "auto", "float16"); input.below(3)],
        }
        .into(),
        5 => NeedDigest {}.into(),
        6 | 7 => Watching {}.into(),
        8 => Released {}.into(),
        9 | 10 => failure(input).into(),
        11 => Memory {
            current: input.number(),
            leased: 0,
        }
        .into(),
        12 => Stopping {}.into(),
        _ => input.one_of(&[
            Message::from(Leading {}),
            Defined { daemon: on }.into(),
            Adopted { pid: 20 }.into(),
        ]),
    }
}

fn failure(input: &mut Input<'_>) -> Failure {
    Failure {
        code: input.below(18) as u16,
        retryable: input.flag(),
        message: "x".repeat(input.short() as usize % 5000),
    }
}

/// What should come with a message, or something else now and then.
pub fn descriptors(message: &Message, input: &mut Input<'_>, ledger: &Ledger) -> Vec<Fd> {
    let mut all = match message {
        Message::Publish(publish) => of_content(&publish.content, ledger),
        Message::State(state) => of_content(&state.content, ledger),
        Message::Define(_) | Message::Control(_) => [FileKind::Other, FileKind::Listener]
            .map(|file| ledger.open(Facts { file, size: 0 }))
            .into(),
        _ => vec![],
    };
    match input.below(16) {
        12 => drop(all.pop()),
        13 => all.push(ledger.memory(10)),
        14 => all.reverse(),
        15 => {
            for fd in &mut all {
                fd.facts.size ^= 1;
            }
        }
        _ => {}
    }
    all.truncate(crate::wire::frame::MAX_DESCRIPTORS);
    all
}

fn of_content(content: &ContentInfo, ledger: &Ledger) -> Vec<Fd> {
    let region = |handle, bytes| match handle {
        HandleKind::Memfd => Some(ledger.memory(bytes)),
        HandleKind::CudaFd => Some(ledger.open(Facts {
            file: FileKind::CharDevice { major: 195 },
            size: 0,
        })),
        HandleKind::CudaIpc => None,
    };
    let regions = content
        .regions
        .iter()
        .filter_map(|info| region(info.handle, info.bytes));
    let mut all = vec![ledger.memory(content.manifest_bytes)];
    all.extend(regions);
    all
}
