//! The bare machines in virtual time: no sockets, no threads, integers for descriptors.
//!
//! What a runtime's driver does beside a machine is done here in its place: it follows a lease up, and says what
//! an engine makes of a memory query.

use crate::host::Host;
use crate::ledger::{Fd, File};
use crate::stage::{Act, Content, Daemon, End, Given, Order, Reaction, Stage, What};
use crate::world::{self, Errand, UID, World};
use std::collections::{BTreeMap, VecDeque};
use weightd_blocking::LeaseEvent;
use weightd_core::content::{DeviceUuid, Generation};
use weightd_core::machine::{
    Attach, AttachError, AttachOptions, Fault, HandoverEvent, Mode, Outcome, Publish, Query, Renewal,
    Renewed, Vault, VaultEvent,
};
use weightd_core::peer::{Facts, FileKind};
use weightd_core::time::{Now, Span};
use weightd_core::wire::message::{
    ContentInfo, DaemonInfo, Digest, ErrorCode, Expects, GetMemory, Holds, Memory, Message,
    Publish as Publication,
};

/// What every engine of a scenario would give up within.
const PATIENCE: Span = Span::secs(600);
/// What the device has, beyond which nothing is published.
const DEVICE: u64 = 1 << 20;

pub struct Virtual {
    world: World,
    daemon: Daemon,
    /// What is in memory.
    contents: BTreeMap<File, Content>,
    /// Whether what is handed out can be imported.
    sound: bool,
    impostor: Option<Impostor>,
    leases: Vec<Lease>,
}

struct Impostor {
    act: Act,
    _listener: Fd,
    /// The connections that it has looked at.
    known: Vec<usize>,
}

/// A lease, by whichever of the world's engines has it now.
struct Lease {
    engine: usize,
    held_by: usize,
    generation: Generation,
    doing: Doing,
    lost: Option<LeaseEvent>,
    events: VecDeque<LeaseEvent>,
}

#[derive(Clone, Copy)]
enum Doing {
    Leasing,
    Renewing,
    /// The daemon is looked for again at this moment.
    Resting(Now),
    /// Another generation is served.
    Nothing,
}

/// One of the world's engines; another after a reload.
pub struct Engine {
    number: usize,
    order: Order,
}

impl Virtual {
    fn open(&mut self) {
        let info = DaemonInfo {
            publish: self.daemon.publish,
            no_release: self.daemon.no_release,
            key: self.daemon.key.clone(),
            ..world::info(0, false)
        };
        self.world.start_vault_of([info]);
        self.world.start_server();
        self.world.start_loader();
        self.world.run();
    }

    fn vault(&mut self) -> &mut Host<Vault<Fd>> {
        self.world.vault.as_mut().expect("a launcher")
    }

    fn give(&mut self, given: Given) -> Fd {
        let (file, bytes) = match given {
            Given::Sealed(bytes) => (FileKind::Memory { sealed: true }, bytes),
            Given::Unsealed(bytes) => (FileKind::Memory { sealed: false }, bytes),
            Given::Other => (FileKind::Other, Vec::new()),
        };
        let size = bytes.len() as u64;
        let fd = self.world.ledger.open(Facts { file, size });
        let content = Content {
            mark: bytes.first().copied().unwrap_or_default(),
            bytes: size,
            sound: true,
        };
        self.contents.insert(fd.file, content);
        fd
    }

    /// Everything that can happen at this moment.
    fn settle(&mut self) {
        loop {
            self.world.run();
            let moved = self.act_as_impostor() | self.follow_leases();
            if !moved {
                return;
            }
        }
    }

    fn act_as_impostor(&mut self) -> bool {
        let Some(mut impostor) = self.impostor.take() else {
            return false;
        };
        let mut moved = false;
        for raw in self.world.impostor.clone().unwrap_or_default() {
            if !impostor.known.contains(&raw) {
                impostor.known.push(raw);
                self.react(raw, (impostor.act)(None));
                moved = true;
            }
            for frame in self.world.frames(raw) {
                let message = Message::decode(frame.kind, &frame.body).expect("engines say messages");
                self.react(raw, (impostor.act)(Some((&message, frame.request))));
                moved = true;
            }
        }
        self.impostor = Some(impostor);
        moved
    }

    fn react(&mut self, raw: usize, reaction: Reaction) {
        let gives = reaction.gives.into_iter().map(|given| self.give(given)).collect();
        if !reaction.says.is_empty() {
            self.world.send(raw, &reaction.says, gives);
        }
        if reaction.ends {
            self.world.run();
            self.world.hang_up(raw);
        }
    }

    /// What a runtime does in the background.
    fn follow_leases(&mut self) -> bool {
        let (now, mut moved) = (self.world.now, false);
        for lease in &mut self.leases {
            let held_by = &self.world.engines[lease.held_by];
            let renews = match lease.doing {
                Doing::Leasing => held_by.lease_ended,
                Doing::Resting(until) => now >= until,
                Doing::Renewing | Doing::Nothing => false,
            };
            if renews {
                let renewal = Renewal::new(now, lease.generation, UID);
                lease.held_by = self.world.send_out(0, Errand::Renewal(renewal));
                lease.doing = Doing::Renewing;
                moved = true;
            } else if let (Doing::Renewing, Some(world::End::Renewed(renewed))) = (lease.doing, &held_by.end)
            {
                lease.renewed(renewed.clone());
                moved = true;
            }
        }
        moved
    }

    /// Lets time pass until something is to be done, or until the moment. False when that has come.
    fn pass_on(&mut self, until: Now) -> bool {
        let rests = self.leases.iter().filter_map(|lease| match lease.doing {
            Doing::Resting(until) => Some(until),
            _ => None,
        });
        let next = rests.min().map_or(until, |rest| rest.min(until));
        self.world.pass_to_the_next_deadline(next);
        self.world.now < until
    }

    /// Lets as much time pass as it takes.
    fn wait_for<T>(&mut self, what: &str, mut found: impl FnMut(&mut Virtual) -> Option<T>) -> T {
        let until = self.world.now + PATIENCE;
        loop {
            self.settle();
            if let Some(found) = found(self) {
                return found;
            }
            assert!(self.pass_on(until), "it waits for {what} for ever");
        }
    }

    fn lease(&self, engine: &Engine) -> &Lease {
        let mut leases = self.leases.iter().rev();
        let lease = leases.find(|lease| lease.engine == engine.number);
        lease.expect("a lease")
    }

    /// What has become of an engine, which goes on with it.
    fn ended(&mut self, engine: &Engine, end: world::End) -> End {
        let is_query = matches!(engine.order.what, What::Memory);
        let mut lease = |generation, leased| {
            if leased {
                self.leases.push(Lease {
                    engine: engine.number,
                    held_by: engine.number,
                    generation,
                    doing: Doing::Leasing,
                    lost: None,
                    events: VecDeque::new(),
                });
            }
        };
        match end {
            world::End::Done(Outcome::Mapped { generation, leased }) => {
                lease(generation, leased);
                End::Mapped { generation, leased }
            }
            world::End::Done(Outcome::Copied { generation, released }) => {
                End::Copied { generation, released }
            }
            world::End::Done(Outcome::Unchanged { .. }) => End::Unchanged,
            world::End::Disk(because) => End::Disk(because),
            world::End::Answered(Message::Memory(memory)) => End::Memory(memory.current),
            // A query, which a driver judges.
            world::End::Answered(_) | world::End::Failed(_) if is_query && engine.order.fallback => {
                End::Memory(0)
            }
            world::End::Answered(other) => End::Failed(AttachError::Malformed {
                why: format!("the daemon answered with a {} message", other.name()),
            }),
            world::End::Failed(error) => End::Failed(error),
            world::End::Published(published) => {
                lease(published.generation, published.leased);
                End::Published {
                    generation: published.generation,
                    leased: published.leased,
                }
            }
            world::End::NotPublished(error) => End::NotPublished(error),
            other => panic!("{other:?} is no end of an errand"),
        }
    }
}

impl Lease {
    fn renewed(&mut self, renewed: Renewed) {
        let generation = self.generation;
        match renewed {
            Renewed::Leased => {
                self.doing = Doing::Leasing;
                self.lost = None;
                self.events.push_back(LeaseEvent::LeasedAgain { generation });
            }
            Renewed::Lost { why, again } => {
                self.doing = again.map_or(Doing::Nothing, Doing::Resting);
                if self.lost.is_none() {
                    let lost = LeaseEvent::Lost { generation, why };
                    self.lost = Some(lost.clone());
                    self.events.push_back(lost);
                }
            }
        }
    }
}

impl Stage for Virtual {
    type Engine = Engine;
    type Stranger = usize;

    fn start(daemon: Daemon) -> Virtual {
        let mut world = World::new();
        world.limits = daemon.limits;
        world.device_bytes = DEVICE;
        let is_there = daemon.publish.is_some();
        let mut stage = Virtual {
            world,
            daemon,
            contents: BTreeMap::new(),
            sound: true,
            impostor: None,
            leases: Vec::new(),
        };
        if is_there {
            stage.open();
        }
        stage
    }

    fn load(&mut self, content: Content) -> Generation {
        if self.world.vault.is_none() {
            self.open();
        }
        let expects = match self.vault().machine.holds(0) {
            Some(Holds::Content(generation)) => Expects::Generation(generation),
            _ => Expects::Empty,
        };
        let (info, given) = self.genuine(content);
        let descriptors = given.into_iter().map(|given| self.give(given)).collect();
        self.sound = content.sound;
        let publication = Publication {
            daemon: 0,
            generation: None,
            expects,
            key: self.daemon.key.clone(),
            content: info,
        };
        let loader = self.world.loader.as_mut().expect("a loader");
        loader.publish(publication, descriptors);
        self.settle();
        match self.world.published.pop() {
            Some(HandoverEvent::Published { generation, .. }) => generation,
            other => panic!("{other:?}"),
        }
    }

    fn digest(&mut self, digest: [u8; 32]) {
        let loader = self.world.loader.as_mut().expect("a loader");
        loader.digest(Digest { daemon: 0, digest });
        self.settle();
    }

    fn lose(&mut self) {
        let Some(Holds::Content(generation)) = self.vault().machine.holds(0) else {
            panic!("it holds nothing to lose")
        };
        self.vault().input(|vault| vault.lost(0, generation));
        self.settle();
    }

    fn reports(&mut self) -> usize {
        self.settle();
        let events = self.vault().events.iter();
        let reports = events.filter(|event| matches!(event, VaultEvent::ImportFailed { .. }));
        reports.count()
    }

    fn kill_server(&mut self) {
        self.world.kill_server();
        self.settle();
    }

    fn start_server(&mut self) {
        self.world.start_server();
        self.settle();
    }

    fn go(&mut self) {
        if self.world.server.is_some() {
            self.world.kill_server();
        }
        if self.world.vault.is_some() {
            self.world.kill_loader();
            self.world.kill_vault();
        }
        self.settle();
    }

    fn impersonate(&mut self, sound: bool, act: Act) {
        self.go();
        let listener = self.world.ledger.open(Facts {
            file: FileKind::Listener,
            size: 0,
        });
        self.world.listeners = vec![listener.file];
        self.world.impostor = Some(Vec::new());
        self.sound = sound;
        self.impostor = Some(Impostor {
            act,
            _listener: listener,
            known: Vec::new(),
        });
    }

    fn device(&self) -> DeviceUuid {
        world::device(0)
    }

    fn genuine(&self, content: Content) -> (ContentInfo, Vec<Given>) {
        let sealed = |bytes| Given::Sealed(vec![content.mark; bytes as usize]);
        let info = world::content(64, &[content.bytes]);
        (info, vec![sealed(64), sealed(content.bytes)])
    }

    fn begin(&mut self, order: Order) -> Engine {
        let options = AttachOptions {
            mode: order.mode,
            fallback: order.fallback,
            connect_timeout: order.connect_timeout,
            state_timeout: order.state_timeout,
            role: order.role,
            device: Some(world::device(if order.here { 0 } else { 9 })),
            is_reload: matches!(order.what, What::Reload(_)),
            current: match order.what {
                What::Reload(current) => current,
                _ => None,
            },
            uid: UID,
        };
        let key = order.key.clone();
        let errand = match order.what {
            What::Load | What::Reload(_) => Errand::Attach(Attach::new(options, key)),
            What::Memory => Errand::Query(Query::new(&options, GetMemory {})),
            What::Publish(_) => Errand::Publish(Publish::new(&options, key)),
        };
        let number = self.world.send_out(0, errand);
        self.world.server_uid = if order.ours { UID } else { UID + 1 };
        let engine = &mut self.world.engines[number];
        engine.stays = order.stays;
        engine.digest = order.digest.clone();
        engine.build = order.work.clone();
        if !self.sound {
            engine.import = Err(Fault::Malformed("it is no manifest".to_owned()));
        }
        if let What::Publish(content) = order.what {
            engine.fill = order.work.clone().map(|()| content.bytes).map_err(Fault::Other);
        }
        if matches!(order.what, What::Memory) && order.mode == Mode::Copy {
            // It is in memory of the engine's own, and nobody is asked.
            engine.end = Some(world::End::Answered(Message::from(Memory {
                current: 0,
                leased: 0,
            })));
        }
        Engine { number, order }
    }

    fn works(&mut self, engine: &mut Engine) {
        let number = engine.number;
        self.wait_for("the engine's own work", |stage| {
            let engine = &stage.world.engines[number];
            assert_eq!(engine.end, None, "it does not come to its own work");
            engine.is_at_work().then_some(())
        });
    }

    fn end(&mut self, engine: &mut Engine) -> End {
        let number = engine.number;
        self.world.engines[number].stays = false;
        let end = self.wait_for("the engine", |stage| stage.world.engines[number].end.clone());
        if let (What::Publish(content), Some([_, region])) =
            (&engine.order.what, &self.world.engines[number].filled)
        {
            self.contents.insert(region.file, *content);
        }
        self.ended(engine, end)
    }

    fn reload(&mut self, engine: &mut Engine, mut order: Order) -> End {
        let had = self.content(engine).bytes;
        let served = self.world.vault.as_ref();
        let served = served.and_then(|vault| vault.machine.content(0));
        if order.mode == Mode::Copy && served.is_some_and(|(_, served, _)| served.bytes() != had) {
            order.work = Err("the shapes differ".to_owned());
        }
        let (new, end) = self.run(order);
        match end {
            End::Mapped { .. } | End::Copied { .. } => self.leave(std::mem::replace(engine, new)),
            _ => self.leave(new),
        }
        end
    }

    fn reads(&self, engine: &Engine) -> u8 {
        self.content(engine).mark
    }

    fn event(&mut self, engine: &mut Engine) -> LeaseEvent {
        let number = engine.number;
        self.wait_for("an event", |stage| {
            let mut leases = stage.leases.iter_mut().rev();
            leases.find(|lease| lease.engine == number)?.events.pop_front()
        })
    }

    fn hears_late(&mut self, engine: &mut Engine) -> Option<LeaseEvent> {
        self.lease(engine).lost.clone()
    }

    fn is_lost(&self, engine: &Engine) -> bool {
        self.lease(engine).lost.is_some()
    }

    fn leave(&mut self, engine: Engine) {
        let leases = self.leases.extract_if(.., |lease| lease.engine == engine.number);
        for held_by in leases.map(|lease| lease.held_by) {
            self.world.end_engine(held_by);
        }
        self.world.end_engine(engine.number);
        self.settle();
    }

    fn ask(&mut self, question: Message) -> Result<Message, ErrorCode> {
        let raw = self.world.raw(0);
        self.world.say(raw, question, Vec::new());
        let answer = self.wait_for("an answer", |stage| stage.world.heard(raw).pop());
        self.world.hang_up(raw);
        self.settle();
        match answer {
            Message::Failure(failure) => Err(ErrorCode::from_number(failure.code)),
            answer => Ok(answer),
        }
    }

    fn stranger(&mut self) -> usize {
        self.world.raw(0)
    }

    fn says(&mut self, stranger: &mut usize, bytes: &[u8], given: Vec<Given>) {
        let descriptors = given.into_iter().map(|given| self.give(given)).collect();
        self.world.send(*stranger, bytes, descriptors);
        // What is said while it hears nothing stays unread.
        self.world.raws.get_mut(stranger).expect("a stranger").deaf = true;
        self.settle();
    }

    fn hears(&mut self, stranger: &mut usize, frames: usize) -> Vec<Message> {
        let raw = *stranger;
        self.world.raws.get_mut(&raw).expect("a stranger").deaf = false;
        self.wait_for("an answer", |stage| {
            (stage.world.raws[&raw].heard.len() >= frames).then(|| stage.world.heard(raw))
        })
    }

    fn hears_the_end(&mut self, stranger: &mut usize) -> Vec<Message> {
        let raw = *stranger;
        self.world.raws.get_mut(&raw).expect("a stranger").deaf = false;
        self.wait_for("the end", |stage| {
            stage.world.raws[&raw].ended.then(|| stage.world.heard(raw))
        })
    }

    fn hangs_up(&mut self, stranger: usize) {
        self.world.hang_up(stranger);
        self.settle();
    }

    fn pass(&mut self, span: Span) {
        let until = self.world.now + span;
        loop {
            self.settle();
            if !self.pass_on(until) {
                return self.settle();
            }
        }
    }
}

impl Virtual {
    fn content(&self, engine: &Engine) -> Content {
        let engine = &self.world.engines[engine.number];
        let mapped = engine.mapped.as_ref().map(|mapped| mapped.regions[0].file);
        let filled = engine.filled.as_ref().map(|[_, region]| region.file);
        let file = mapped.or(filled).or(engine.copied).expect("weights");
        self.contents[&file]
    }
}

/// When everybody has ended, nothing is left open, and nothing was lost on the way.
impl Drop for Virtual {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.impostor = None;
            std::mem::replace(&mut self.world, World::new()).finish();
        }
    }
}

/// Over real sockets the devices are those of this machine, which have room for both.
#[test]
fn without_room_for_both_the_old_content_gives_way_to_the_new() {
    use crate::stage::{FIRST, SECOND, processed};
    use weightd_core::wire::message::Replace;
    let large = |content| Content {
        bytes: DEVICE / 2 + 1,
        ..content
    };
    let mut stage = Virtual::start(Daemon {
        publish: Some(Replace::DropFirst),
        ..Daemon::publishable()
    });
    stage.try_out(Order::publish(large(FIRST))).published();
    let (engine, _) = stage.run(Order::load().keyed(processed("packed")));
    let anew = Order::publish(large(SECOND)).keyed(processed("anew"));
    let (publisher, end) = stage.run(anew);
    assert_eq!(stage.status().holds, Holds::Content(end.published()));
    assert_eq!(
        (stage.reads(&engine), stage.reads(&publisher)),
        (FIRST.mark, SECOND.mark)
    );
}
