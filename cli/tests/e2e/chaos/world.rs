//! One socket directory and all that runs on it, step by step.

mod acts;
mod ends;
mod looks;
mod truths;

use super::engines::Engine;
use super::flood::Flood;
use super::plan::{Act, Era, Source, Step};
use super::trend::Trends;
use crate::checkpoints::*;
use crate::harness::*;
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;
use weightd_checkpoint::Checkpoint;

/// A moment that does not come is not waited for longer.
const LONGEST_MOMENT: Duration = Duration::from_millis(250);
/// The exit code of [`Running::code`] for kill -9.
const KILLED: i32 = -9;
/// How many engines may stay.
const ENGINES: usize = 3;
/// A digest of each checkpoint, and what a step may have left half-written.
const REMEMBERED: usize = 8;

/// A daemon, as `weightd status` shows it.
#[derive(Clone, Debug, PartialEq)]
pub struct Daemon {
    pub socket: String,
    pub server: u32,
    pub generation: String,
    pub state: String,
    pub rank: u32,
    pub draft: bool,
    /// The digest of what it serves, in hex, where it is known.
    pub digest: String,
    pub leases: usize,
    /// The generations that somebody leases.
    pub leased: Vec<String>,
}

impl Daemon {
    pub fn serves(&self, generation: &str) -> bool {
        self.state == "serving" && self.generation == generation
    }
}

/// A checkpoint, and by which digest its publications are known.
struct Model {
    dir: PathBuf,
    digest: [u8; 32],
    /// Whether its files say by their times when they change.
    steady: bool,
}

pub struct World {
    era: Era,
    /// Of a publishing era two with the same shapes, else one.
    models: Vec<Model>,
    /// What every command but a client's of one socket needs to be told.
    options: Vec<String>,
    engines: Vec<Engine>,
    holder: Option<Running>,
    /// Whoever launched and is still heard, the last one last.
    launchers: Vec<Running>,
    /// Who started the server, and so has its lines in its log, perhaps after its death.
    logs_to: u32,
    /// The last of them leads.
    leads: bool,
    /// Of this step.
    killed: Vec<u32>,
    /// One of those was a child of the launcher that was about to start.
    killed_its_child: bool,
    /// The socket directory was removed in this step.
    removed: bool,
    /// The last field but for this: whatever still runs in it ends with it.
    site: Site,
}

impl World {
    pub fn new(device: &'static str, era: Era) -> World {
        let site = Site::on(device);
        let dirs = match era.source {
            Source::Loader { model: name, .. } => vec![model(name)],
            Source::Publishers => {
                let one = copy_of(&model("llama"), &site.path().join("one"));
                vec![one.clone(), tuned(&one, &site.path().join("other"))]
            }
        };
        let digest = |dir: PathBuf| Model {
            digest: Checkpoint::open(&dir)
                .unwrap()
                .digest(&Default::default(), &Default::default())
                .unwrap(),
            steady: is_steady(&dir),
            dir,
        };
        let mut options = site.sharing(era.tp);
        if let Source::Loader {
            draft: Some(draft), ..
        } = era.source
        {
            let config = json!({ "method": "eagle3", "model": model(draft) });
            options.extend(["--speculative-config".to_owned(), config.to_string()]);
        }
        World {
            era,
            models: dirs.into_iter().map(digest).collect(),
            options,
            engines: Vec::new(),
            holder: None,
            launchers: Vec::new(),
            logs_to: 0,
            leads: false,
            killed: Vec::new(),
            killed_its_child: false,
            removed: false,
            site,
        }
    }

    /// Whatever a step does, afterwards a launcher serves, all that is served is right, and so is all that was
    /// mapped before.
    pub fn step(&mut self, step: &Step) {
        self.killed.clear();
        self.killed_its_child = false;
        self.removed = false;
        if step.act != Act::Start {
            self.a_launcher_serves(false);
            self.has_content();
        } else if self.leads {
            self.stop();
        }
        self.comes_and_goes(step);
        let before = match step.act {
            Act::Start => Vec::new(),
            _ => self.all_daemons(),
        };
        let leader = self.launchers.last().filter(|_| self.leads).map(Running::pid);
        if step.act == Act::Adopt {
            self.kill_launcher(step.hasty);
        }
        let flood = step.flood.clone().map(|dice| Flood::start(self.site.dir(), dice));
        let target = self.other_than_served(&before);
        let mut client = self.begin(step, &before, target);
        let standing: Vec<_> = step
            .blows
            .iter()
            .filter_map(|blow| self.strike(step, blow, &client, &before))
            .collect();
        for stands in standing {
            stands.join().unwrap();
        }
        let done = match step.act {
            Act::Start | Act::Adopt => self.has_started(client),
            Act::Stop => self.has_stopped(&mut client),
            act => self.has_done(act, &mut client, leader),
        };
        drop(flood);
        self.engines.iter().for_each(Engine::is_intact);
        self.a_launcher_serves(step.one_more && step.act != Act::Start);
        let now = self.all_daemons();
        if !before.is_empty() && step.act != Act::Stop {
            self.follows(step, &before, &now, leader, target, done);
        }
        self.everybody_knows();
        self.has_content();
        for daemon in &self.all_daemons() {
            self.is_right(daemon);
        }
    }

    /// What long-lived processes hold now.
    pub fn sample(&self, trends: &mut Trends) {
        let daemons = self.all_daemons();
        let leases = daemons.iter().map(|daemon| daemon.leases).sum();
        trends.sample("server", daemons[0].server, leases);
        trends.sample("launcher", self.launchers.last().unwrap().pid(), 0);
    }

    /// All ends, and nothing is left but what engines have mapped.
    pub fn end(mut self) {
        if self.leads {
            self.stop();
        }
        for engine in &self.engines {
            engine.is_intact();
        }
        self.lets_holder_go();
        self.site.assert_clean();
        let remembered = fs::read_dir(self.site.path().join("cache/weightd"));
        let remembered = remembered.map_or(0, Iterator::count);
        assert!(remembered <= REMEMBERED, "{remembered} files remember digests");
    }

    /// What is to be known of one that failed.
    pub fn tell(&self) {
        eprintln!("{:?}, killed {:?} in the last step", self.era, self.killed);
        for launcher in &self.launchers {
            eprintln!("launcher {} said:\n{}", launcher.pid(), launcher.log());
        }
        eprintln!("left: {:?}, {:?}", self.site.left(), self.site.processes());
    }
}

/// A model with the same shapes as `of`, and one other bit.
fn tuned(of: &Path, to: &Path) -> PathBuf {
    let tuned = copy_of(of, to);
    let files = fs::read_dir(&tuned).unwrap().map(|entry| entry.unwrap().path());
    let weights = files.filter(|path| path.extension().is_some_and(|end| end == "safetensors"));
    let last = weights.max().unwrap();
    let mut bytes = fs::read(&last).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&last, bytes).unwrap();
    tuned
}
