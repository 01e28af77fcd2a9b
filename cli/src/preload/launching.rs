//! How every launcher begins: what is there already comes first.

use super::adoption::{self, Past};
use super::cannot;
use super::digests::Digests;
use super::launcher::Launcher;
use super::manager::{self, Kept, Manager};
use super::setup::Setup;
use super::store::Store;
use crate::confine::no_core_dumps;
use crate::error::CliError;
use crate::health::Health;
use crate::models::Model;
use crate::signals::Signals;
use std::process::ExitCode;
use tracing::warn;
use weightd_checkpoint::Checkpoint;
use weightd_core::wire::message::DaemonInfo;

/// What comes with the process, and is taken before anything is opened.
pub struct Ground {
    kept: Kept,
    store: Option<Store>,
    pub signals: Signals,
}

impl Ground {
    pub fn take() -> Result<Ground, CliError> {
        let kept = manager::kept();
        if let Err(why) = no_core_dumps() {
            warn!("{why}");
        }
        let store = Manager::from_env().map(|manager| Store::new(manager, &kept));
        let signals = Signals::catch().map_err(cannot("catch signals"))?;
        Ok(Ground { kept, store, signals })
    }
}

/// Goes on with what an earlier launcher left of `wanted`, or begins anew where that is `possible`, and runs to
/// the end. `models` are what is loaded, each with its checkpoint.
pub fn launch(
    ground: Ground,
    setup: Setup,
    wanted: Vec<DaemonInfo>,
    (models, checkpoints): (&[Model], Vec<Checkpoint>),
    possible: impl FnOnce() -> Result<(), CliError>,
    health: Option<Health>,
) -> Result<ExitCode, CliError> {
    let Ground {
        kept,
        mut store,
        signals,
    } = ground;
    let mut digests = Digests::new(models, checkpoints, &signals);
    let (daemons, past) = adoption::begin(&setup.dir, wanted, &mut digests, store.as_mut(), kept)?;
    // The files of the checkpoints are nobody's to keep while their weights are served.
    drop(digests);
    if matches!(past, Past::None) {
        possible()?;
    }
    if !matches!(past, Past::None) && setup.wants_checksums() {
        warn!(
            "what is there already is served with the checksums that it has, or without: --checksums is for what is loaded"
        );
    }
    let launcher = Launcher::start(setup, daemons, past, store, signals)?;
    if let Some(health) = health {
        health.answer(launcher.board());
    }
    launcher.run()
}
