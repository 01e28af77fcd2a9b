//! All processes of a node in virtual time: vault, server, loader, engines, and strangers.

mod engine;
mod turn;

pub use engine::{End, Engine, Errand};

use crate::content::{CheckpointId, DeviceUuid, HandleKind, Key, Role};
use crate::machine::{
    Adopt, AskError, Attach, AttachError, AttachOptions, ConnId, ConnectFailure, Ends, Handover,
    HandoverEvent, Held, Inheritance, Limits, Machine, Origin, Server, Vault,
};
use crate::peer::Peer;
use crate::testing::host::Host;
use crate::testing::ledger::{Fd, File, Ledger};
use crate::testing::socket::{Dice, Pipe};
use crate::time::{Now, Span};
use crate::wire::message::{
    ContentInfo, DaemonId, DaemonInfo, Expects, GetState, Message, Publish as Publication, RegionInfo,
    Release, Replace,
};
use crate::wire::{Decoder, Frame};
use std::collections::{BTreeMap, VecDeque};

pub const UID: u32 = 1000;
pub const EPOCH: u64 = 0xE;
pub const VAULT_PID: u32 = 10;
pub const SERVER_PID: u32 = 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Gone,
    Server(ConnId),
    Vault(ConnId),
    Backlog(DaemonId),
    Loader,
    Adopter,
    Engine(usize),
    Raw,
}

struct Wire {
    /// The client, then the host.
    ends: [Side; 2],
    /// What each end has written.
    pipes: [Pipe; 2],
    client: Peer,
}

/// A client that says what a test wants it to say, or somebody who listens in a server's place and does.
#[derive(Default)]
pub struct Raw {
    /// Which end of its wire.
    end: usize,
    out: VecDeque<(Vec<u8>, Vec<Fd>)>,
    decoder: Decoder<Fd>,
    pub heard: Vec<Frame<Fd>>,
    pub ended: bool,
    pub deaf: bool,
    next_request: u32,
}

pub struct World {
    pub now: Now,
    pub ledger: Ledger,
    pub dice: Option<Dice>,
    pub limits: Limits,
    pub vault: Option<Host<Vault<Fd>>>,
    pub server: Option<Host<Server<Fd>>>,
    pub loader: Option<Handover<Fd>>,
    pub published: Vec<HandoverEvent>,
    pub engines: Vec<Engine>,
    pub raws: BTreeMap<usize, Raw>,
    /// Launchers that ask for a server, by their connections.
    pub adopters: BTreeMap<usize, Adopt<Fd>>,
    /// Whether vaults give the control socket's ends to their servers.
    pub controlled: bool,
    wires: Vec<Wire>,
    /// The wires with somebody at an end.
    live: Vec<usize>,
    backlog: VecDeque<usize>,
    pub listeners: Vec<File>,
    /// Somebody who listens in the server's place: the connections that were accepted, as raw clients.
    pub impostor: Option<Vec<usize>>,
    pub capacity: usize,
    /// While set, nothing that was discarded gets closed.
    pub hold_reaper: bool,
    pub server_uid: u32,
    /// What engines that publish, and vaults, have all together.
    pub device_bytes: u64,
}

pub fn device(number: u8) -> DeviceUuid {
    DeviceUuid([number; 16])
}

/// The key of a rank of two: what tests take where any key will do, and change where it matters.
pub fn key(rank: u32) -> Key {
    Key {
        checkpoint: CheckpointId {
            bytes: 100,
            files: Some([1; 32]),
            digest: None,
        },
        model_arch: "LlamaForCausalLM".into(),
        tp_size: 2,
        tp_rank: rank,
        dtype: "auto".into(),
        quantization: String::new(),
        quant_config_hash: None,
        revision: String::new(),
        engine_version: String::new(),
        pp_size: 1,
        pp_rank: 0,
        role: Role::Target,
        dp_size: 1,
        dp_rank: 0,
        enable_expert_parallel: false,
        expert_placement_strategy: "linear".into(),
        layout: "checkpoint".into(),
        processing: "stored".into(),
        extra: BTreeMap::new(),
    }
}

pub fn content(manifest_bytes: u64, regions: &[u64]) -> ContentInfo {
    let regions = regions
        .iter()
        .map(|&bytes| RegionInfo {
            handle: HandleKind::Memfd,
            bytes,
        })
        .collect();
    ContentInfo {
        manifest_bytes,
        regions,
        tensors: 7,
        aliases: 1,
        checksums: false,
    }
}

pub fn info(daemon: DaemonId, no_release: bool) -> DaemonInfo {
    DaemonInfo {
        socket: format!("/run/weightd/{daemon}.sock"),
        global_rank: daemon,
        device_uuid: device(daemon as u8),
        no_release,
        publish: None,
        key: key(daemon),
    }
}

/// The key of a daemon that nobody has published for: its place, and nothing else.
pub fn place(daemon: DaemonId) -> Key {
    Key {
        checkpoint: CheckpointId {
            bytes: 0,
            files: None,
            digest: None,
        },
        model_arch: String::new(),
        dtype: String::new(),
        expert_placement_strategy: String::new(),
        layout: String::new(),
        processing: String::new(),
        ..key(daemon)
    }
}

/// A request for what is served of this daemon, by an engine that has nothing yet.
pub fn get_state_of(daemon: DaemonId) -> GetState {
    GetState {
        key: key(daemon),
        is_reload: false,
    }
}

/// A publication for this daemon, by whoever does not name its generation.
pub fn publication(daemon: DaemonId, expects: Expects, content: ContentInfo) -> Publication {
    Publication {
        daemon,
        generation: None,
        expects,
        key: key(daemon),
        content,
    }
}

/// A daemon that takes publications.
pub fn publishable(daemon: DaemonId) -> DaemonInfo {
    DaemonInfo {
        publish: Some(Replace::Keep),
        key: place(daemon),
        ..info(daemon, false)
    }
}

impl World {
    #[allow(clippy::new_without_default)] // there is nothing usual about a world
    pub fn new() -> World {
        World {
            now: Now(1_000_000),
            ledger: Ledger::default(),
            dice: None,
            limits: Limits::default(),
            vault: None,
            server: None,
            loader: None,
            published: Vec::new(),
            engines: Vec::new(),
            raws: BTreeMap::new(),
            adopters: BTreeMap::new(),
            controlled: false,
            wires: Vec::new(),
            live: Vec::new(),
            backlog: VecDeque::new(),
            listeners: Vec::new(),
            impostor: None,
            capacity: 200_000,
            hold_reaper: false,
            server_uid: UID,
            device_bytes: u64::MAX,
        }
    }

    /// A vault with two daemons, its server, and both contents loaded.
    pub fn ready() -> World {
        let mut world = World::new();
        world.start_vault(false);
        world.start_server();
        world.load();
        world.run();
        world
    }

    /// The same, with a control socket, by which another launcher can adopt the server.
    pub fn controlled() -> World {
        let mut world = World::new();
        world.controlled = true;
        world.start_vault(false);
        world.start_server();
        world.load();
        world.run();
        world
    }

    /// Asks for a release of whatever is held, and says by which connection.
    pub fn release(&mut self, daemon: DaemonId) -> usize {
        let raw = self.raw(daemon);
        self.say_release(raw, daemon);
        raw
    }

    pub fn say_release(&mut self, raw: usize, daemon: DaemonId) {
        let generation = None;
        self.say(raw, Release { daemon, generation }, vec![]);
        self.run();
    }

    pub fn start_vault(&mut self, no_release: bool) {
        self.start_vault_of((0..2).map(|daemon| info(daemon, no_release)));
    }

    pub fn start_vault_of(&mut self, daemons: impl IntoIterator<Item = DaemonInfo>) {
        let mut held = Vec::new();
        for info in daemons {
            let (lock, listener) = (self.ledger.lock().strict(), self.ledger.listener().strict());
            self.listeners.push(listener.file);
            held.push(Held { info, lock, listener });
        }
        let mut vault = Vault::new(VAULT_PID, EPOCH, held);
        if self.controlled {
            vault = vault.with_control(self.ends());
        }
        self.vault = Some(Host::new(vault));
    }

    /// A lock and a listener.
    pub fn ends(&self) -> Ends<Fd> {
        Ends::new(self.ledger.lock().strict(), self.ledger.listener().strict())
    }

    /// Launcher `pid` asks for the server that is there.
    pub fn adopt(&mut self, pid: u32) -> usize {
        let client = Peer { pid, uid: UID };
        let peer = Peer {
            pid: SERVER_PID,
            uid: self.server_uid,
        };
        let adopt = Adopt::new(self.now, pid, peer, UID, Span::secs(10));
        let now = self.now;
        let server = self.server.as_mut().expect("a server");
        let conn = server.input(|server| server.accept(now, Origin::Control, client));
        let wire = self.wire(Side::Adopter, client, Side::Server(conn));
        self.adopters.insert(wire, adopt);
        wire
    }

    /// What became of an adoption; the connection stays for [`World::follow`].
    pub fn adopted(&mut self, wire: usize) -> Result<Inheritance<Fd>, AskError> {
        let mut adopt = self.adopters.remove(&wire).expect("an adopter");
        assert!(adopt.is_over(self.now), "nothing more is waited for");
        adopt.finish()
    }

    /// A launcher goes on with what it adopted.
    pub fn follow(&mut self, wire: usize, pid: u32, epoch: u64, inheritance: Inheritance<Fd>) {
        let mut host = Host::new(Vault::inheriting(pid, epoch, inheritance));
        let (now, uid) = (self.now, self.server_uid);
        let peer = Peer { pid: SERVER_PID, uid };
        let conn = host.input(|vault| vault.accept(now, Origin::Server, peer));
        self.wires[wire].ends[0] = Side::Vault(conn);
        self.vault = Some(host);
    }

    /// A launcher that adopts dies.
    pub fn kill_adopter(&mut self, wire: usize) {
        self.adopters.remove(&wire);
        self.close_end(wire, 0);
    }

    /// A fresh server, which the vault leads if there is one.
    pub fn start_server(&mut self) {
        let server = Server::new(self.now, "0.1.0", SERVER_PID, self.server_uid, self.limits);
        self.server = Some(Host::new(server));
        if self.vault.is_some() {
            self.lead_server();
        }
    }

    /// Connects the vault to the control socket of the server that is there.
    pub fn lead_server(&mut self) {
        let (now, peer) = (
            self.now,
            Peer {
                pid: SERVER_PID,
                uid: UID,
            },
        );
        let vault = self.vault.as_mut().expect("a vault");
        let leader = vault.input(|vault| vault.accept(now, Origin::Server, peer));
        let client = Peer {
            pid: VAULT_PID,
            uid: UID,
        };
        let wire = self.wire(Side::Vault(leader), client, Side::Gone);
        let server = self.server.as_mut().expect("a server");
        let conn = server.input(|server| server.accept(now, Origin::Control, client));
        self.wires[wire].ends[1] = Side::Server(conn);
    }

    pub fn start_loader(&mut self) {
        let (now, peer) = (self.now, Peer { pid: 30, uid: UID });
        self.loader = Some(Handover::default());
        let vault = self.vault.as_mut().expect("a vault");
        let conn = vault.input(|vault| vault.accept(now, Origin::Loader, peer));
        self.wire(Side::Loader, peer, Side::Vault(conn));
    }

    /// A loader that publishes 1000 bytes for daemon 0 and 2000 for daemon 1.
    pub fn load(&mut self) {
        self.start_loader();
        for daemon in 0..2 {
            self.publish(daemon, 1000 * (u64::from(daemon) + 1), Expects::Empty);
        }
    }

    /// Publishes one region; returns the file of its memory.
    pub fn publish(&mut self, daemon: DaemonId, bytes: u64, expects: Expects) -> File {
        let region = self.ledger.memory(bytes);
        let file = region.file;
        let publication = publication(daemon, expects, content(64, &[bytes]));
        let descriptors = vec![self.ledger.memory(64), region];
        self.loader
            .as_mut()
            .expect("a loader")
            .publish(publication, descriptors);
        file
    }

    pub fn attach(&mut self, daemon: DaemonId, options: AttachOptions, key: Key) -> usize {
        self.send_out(daemon, Errand::Attach(Attach::new(options, key)))
    }

    /// An engine that is out for something, at this daemon.
    pub fn send_out(&mut self, daemon: DaemonId, errand: Errand) -> usize {
        self.engines.push(Engine::new(self.now, daemon, errand));
        self.engines.len() - 1
    }

    /// The engine's process ends.
    pub fn end_engine(&mut self, engine: usize) {
        let engine = &mut self.engines[engine];
        (engine.mapped, engine.filled) = (None, None);
        let ended = AttachError::Empty {
            why: "the test ends it".into(),
        };
        engine.end.get_or_insert(End::Failed(ended));
        if let Some(wire) = engine.wire.take() {
            self.close_end(wire, 0);
        }
    }

    /// A raw client on a daemon's socket.
    pub fn raw(&mut self, daemon: DaemonId) -> usize {
        self.raw_as(Origin::Daemon(daemon), Peer { pid: 50, uid: UID })
    }

    pub fn raw_as(&mut self, origin: Origin, client: Peer) -> usize {
        let now = self.now;
        let wire = match origin {
            Origin::Daemon(daemon) => self.connect(daemon, Side::Raw, client).expect("a listener"),
            Origin::Control => {
                let server = self.server.as_mut().expect("a server");
                let conn = server.input(|server| server.accept(now, origin, client));
                self.wire(Side::Raw, client, Side::Server(conn))
            }
            Origin::Loader | Origin::Server => {
                let vault = self.vault.as_mut().expect("a vault");
                let conn = vault.input(|vault| vault.accept(now, origin, client));
                self.wire(Side::Raw, client, Side::Vault(conn))
            }
        };
        self.raws.insert(wire, Raw::default());
        wire
    }

    /// A raw client says a whole message; returns its request id.
    pub fn say(&mut self, raw: usize, message: impl Into<Message>, descriptors: Vec<Fd>) -> u32 {
        let raw = self.raws.get_mut(&raw).expect("a raw client");
        raw.next_request += 1;
        let request = raw.next_request;
        raw.out
            .push_back((frame(&message.into(), request, descriptors.len()), descriptors));
        request
    }

    /// A raw client sends bytes.
    pub fn send(&mut self, raw: usize, bytes: &[u8], descriptors: Vec<Fd>) {
        self.raws
            .get_mut(&raw)
            .expect("a raw client")
            .out
            .push_back((bytes.to_vec(), descriptors));
    }

    /// The frames that a raw client has got since the last call.
    pub fn frames(&mut self, raw: usize) -> Vec<Frame<Fd>> {
        std::mem::take(&mut self.raws.get_mut(&raw).expect("a raw client").heard)
    }

    /// The same as messages.
    pub fn heard(&mut self, raw: usize) -> Vec<Message> {
        let frames = self.frames(raw);
        frames
            .iter()
            .map(|frame| Message::decode(frame.kind, &frame.body).expect("a message"))
            .collect()
    }

    /// So many bytes of what a raw client is sent, and does not read, find room.
    #[allow(dead_code)] // as the errands
    pub fn narrow(&mut self, raw: usize, room: usize) {
        let end = self.raws[&raw].end;
        self.wires[raw].pipes[1 - end].capacity = room;
        self.raws.get_mut(&raw).expect("a raw client").deaf = room == 0;
    }

    pub fn hang_up(&mut self, raw: usize) {
        self.close_end(raw, self.raws[&raw].end);
    }

    pub fn kill_server(&mut self) {
        let server = self.server.take().expect("a server");
        self.ledger.killing(server);
        self.close_all(|side| matches!(side, Side::Server(_)));
        self.reset_backlog();
    }

    pub fn kill_loader(&mut self) {
        self.loader = None;
        self.close_all(|side| side == Side::Loader);
    }

    pub fn kill_vault(&mut self) {
        let vault = self.vault.take().expect("a vault");
        self.ledger.killing(vault);
        self.close_all(|side| matches!(side, Side::Vault(_)));
        self.reset_backlog();
    }

    /// Everybody ends; nothing may be left open, and nothing may have been lost on the way.
    pub fn finish(mut self) {
        assert_eq!(self.ledger.lost(), [], "descriptors are discarded, never dropped");
        if self.server.is_some() {
            self.kill_server();
        }
        if self.vault.is_some() {
            self.kill_vault();
        }
        let ledger = self.ledger.clone();
        drop(self);
        assert_eq!(ledger.open_in_all(), 0, "the world keeps nothing open");
    }

    /// Everything that can happen at this moment.
    pub fn run(&mut self) {
        let mut turns = 0;
        while self.turn() {
            turns += 1;
            assert!(turns < 100_000, "the world never comes to rest");
        }
    }

    /// A few rounds, so that something can happen in the middle of them.
    pub fn some_turns(&mut self, turns: usize) {
        for _ in 0..turns {
            self.turn();
        }
    }

    /// Lets time pass, deadline by deadline.
    pub fn pass(&mut self, span: Span) {
        let until = self.now + span;
        while self.pass_to_the_next_deadline(until) {}
    }

    /// Lets time pass until something is to be done, or until the moment. False when that has come.
    pub fn pass_to_the_next_deadline(&mut self, until: Now) -> bool {
        self.run();
        let engines = self.engines.iter().map(Engine::deadline);
        let deadlines = engines
            .chain([self.server.as_ref().and_then(|server| server.wake_at)])
            .chain([self.vault.as_ref().and_then(|vault| vault.wake_at)]);
        let next = deadlines.flatten().filter(|at| *at > self.now).min();
        self.now = next.map_or(until, |next| next.min(until));
        self.run();
        self.now < until
    }

    fn wire(&mut self, client: Side, peer: Peer, host: Side) -> usize {
        let pipes = [Pipe::new(self.capacity), Pipe::new(self.capacity)];
        self.wires.push(Wire {
            ends: [client, host],
            pipes,
            client: peer,
        });
        self.live.push(self.wires.len() - 1);
        self.wires.len() - 1
    }

    fn connect(&mut self, daemon: DaemonId, client: Side, peer: Peer) -> Result<usize, ConnectFailure> {
        let open = self
            .listeners
            .get(daemon as usize)
            .is_some_and(|file| self.ledger.open_of(*file) > 0);
        if !open {
            return Err(ConnectFailure::Absent("connection refused".to_owned()));
        }
        let wire = self.wire(client, peer, Side::Backlog(daemon));
        self.backlog.push_back(wire);
        Ok(wire)
    }

    /// Connections in the backlog of a listener that nobody holds any more.
    fn reset_backlog(&mut self) {
        for wire in std::mem::take(&mut self.backlog) {
            let Side::Backlog(daemon) = self.wires[wire].ends[1] else {
                continue;
            };
            if self.ledger.open_of(self.listeners[daemon as usize]) > 0 {
                self.backlog.push_back(wire);
            } else {
                self.close_end(wire, 1);
            }
        }
    }

    fn close_all(&mut self, which: impl Fn(Side) -> bool) {
        for wire in self.live.clone() {
            for end in 0..2 {
                if which(self.wires[wire].ends[end]) {
                    self.close_end(wire, end);
                }
            }
        }
    }

    fn close_end(&mut self, wire: usize, end: usize) {
        let wire = &mut self.wires[wire];
        wire.ends[end] = Side::Gone;
        wire.pipes[end].ended = true;
        wire.pipes[1 - end].break_off();
    }
}

/// The bytes of a whole frame.
pub fn frame(message: &Message, request: u32, descriptors: usize) -> Vec<u8> {
    let frame = message.frame(request, descriptors);
    frame.expect("a message that fits")
}
