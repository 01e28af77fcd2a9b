//! A runtime's client and a runtime's server over real sockets, both in this process.

use crate::impostor::Impostor;
use crate::stage::{Act, Content, Daemon, End, Given, Order, Stage, What};
use crate::talk::{self, Talk};
use std::marker::PhantomData;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use tempfile::TempDir;
use weightd_blocking::request::{RequestError, request};
use weightd_blocking::{
    Binding, Contents, Endpoint, Lease, LeaseEvent, LoadError, Loaded, PublishFailed, Published,
};
use weightd_core::content::manifest::{ManifestBuilder, Region, TensorKind, TensorSpec};
use weightd_core::content::{DeviceUuid, Dtype, Generation, HandleKind};
use weightd_core::machine::{AskError, AttachOptions, VaultEvent};
use weightd_core::time::Span;
use weightd_core::wire::Message;
use weightd_core::wire::message::{ContentInfo, Digest, ErrorCode, Expects, Publish, RegionInfo};
use weightd_gpu::{Device, Weights};
use weightd_socket::connect::connect;
use weightd_socket::credentials::our_uid;
use weightd_tests::runtimes::{Model, Subject};
use weightd_tests::{Residence, Resident};

/// Longer than anything takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

pub struct Pair<C, S> {
    client: Arc<C>,
    daemon: Daemon,
    device: Device,
    socket: PathBuf,
    resident: Option<Resident>,
    impostor: Option<Impostor>,
    server: PhantomData<S>,
    dir: TempDir,
}

/// An engine in a thread, until it has come to an end.
pub struct Engine {
    runs: Option<JoinHandle<Result<Loot, End>>>,
    /// Says that it is at its own work.
    works: Receiver<()>,
    /// Lets it go on from there.
    goes_on: Option<Sender<()>>,
    model: Model,
    lease: Option<Lease>,
    events: Receiver<LeaseEvent>,
}

/// What an engine came back with.
struct Loot {
    end: End,
    model: Model,
    lease: Option<Lease>,
}

impl<C: Subject, S: Subject> Pair<C, S> {
    fn open(&mut self) {
        let residence = Residence {
            dir: self.dir.path(),
            device: self.device,
            key: self.daemon.key.clone(),
            publish: self.daemon.publish,
            no_release: self.daemon.no_release,
            limits: self.daemon.limits,
            serve: S::serve,
        };
        self.resident = Some(Resident::start(residence));
    }

    fn resident(&mut self) -> &mut Resident {
        self.resident.as_mut().expect("a daemon")
    }

    pub fn client(&self) -> &C {
        &self.client
    }

    /// The daemon's device.
    pub fn host(&self) -> Device {
        self.device
    }

    fn binding(&self, order: &Order) -> Binding {
        let digest = order.digest.clone();
        self.binding_with(order, move || digest.clone())
    }

    /// The binding of an engine that computes its digest like this.
    pub fn binding_with(
        &self,
        order: &Order,
        digest: impl Fn() -> Result<[u8; 32], String> + Send + Sync + 'static,
    ) -> Binding {
        let uid = our_uid().expect("a user");
        let options = AttachOptions {
            mode: order.mode,
            fallback: order.fallback,
            connect_timeout: order.connect_timeout,
            state_timeout: order.state_timeout,
            role: order.role,
            device: Some(if order.here {
                self.device.uuid()
            } else {
                Device::host(9).uuid()
            }),
            // To an engine of another user the daemon is a stranger.
            uid: if order.ours { uid } else { uid + 1 },
            ..AttachOptions::new(uid)
        };
        let endpoint = Endpoint::socket(&self.socket).expect("a short path");
        Binding::with(endpoint, options, order.key.clone(), digest)
    }

    /// An engine that sets out; `had` is what it may copy into.
    fn set_out(&self, order: Order, had: Model) -> Engine {
        let (client, binding, device) = (Arc::clone(&self.client), self.binding(&order), self.device);
        let (at_work, works) = channel();
        let (goes_on, may_go_on) = channel();
        let work = Work {
            at_work,
            may_go_on,
            stays: order.stays,
            result: order.work.clone(),
        };
        let errand = move || match order.what {
            What::Load => loaded(client.load(binding, build(work, None), Box::new(|_| Ok(None)))),
            What::Reload(current) => match client.reload(binding, current, build(work, had)) {
                Ok(None) => Err(End::Unchanged),
                Ok(Some(reloaded)) => loaded(Ok(reloaded)),
                Err(error) => loaded(Err(error)),
            },
            What::Memory => Err(match client.external_memory(binding) {
                Ok(bytes) => End::Memory(bytes),
                Err(LoadError::Attach(error)) => End::Failed(error),
                Err(other) => panic!("{other}"),
            }),
            What::Publish(content) => {
                let fill = move |filling: &weightd_blocking::Filling| {
                    work.does()?;
                    let bytes = vec![content.mark; content.bytes as usize];
                    filling.write("w", &bytes).map_err(|error| error.to_string())
                };
                published(client.publish(binding, device, contents(content), Box::new(fill)))
            }
        };
        Engine {
            runs: Some(thread::spawn(errand)),
            works,
            goes_on: Some(goes_on),
            model: None,
            lease: None,
            events: channel().1,
        }
    }
}

/// The work that an engine does itself.
struct Work {
    at_work: Sender<()>,
    may_go_on: Receiver<()>,
    stays: bool,
    result: Result<(), String>,
}

impl Work {
    fn does(self) -> Result<(), String> {
        let _ = self.at_work.send(());
        if self.stays {
            // It ends with the scenario at the latest.
            let _ = self.may_go_on.recv();
        }
        self.result
    }
}

/// Goes on with the weights that are mapped or cloned, or takes them over into what it `had`.
fn build(work: Work, had: Model) -> Box<dyn FnOnce(Weights) -> Result<Model, String> + Send> {
    Box::new(move |weights| {
        work.does()?;
        let Some(had) = had else {
            return Ok(Some(Arc::new(Mutex::new(weights))));
        };
        let overwritten = had.lock().expect("weights").overwrite(&weights);
        overwritten.map_err(|error| error.to_string())?;
        Ok(Some(had))
    })
}

fn loaded(result: Result<Loaded<Model>, LoadError>) -> Result<Loot, End> {
    match result {
        Ok(Loaded::Mapped {
            model,
            generation,
            lease,
            ..
        }) => Ok(Loot {
            end: End::Mapped {
                generation,
                leased: lease.is_some(),
            },
            model,
            lease,
        }),
        Ok(Loaded::Copied {
            model,
            generation,
            released,
            ..
        }) => Ok(Loot {
            end: End::Copied { generation, released },
            model,
            lease: None,
        }),
        Ok(Loaded::LoadedFromDisk { because, .. }) => Err(End::Disk(because)),
        Err(LoadError::Attach(error)) => Err(End::Failed(error)),
        Err(other) => panic!("{other}"),
    }
}

fn published(result: Result<Published, PublishFailed>) -> Result<Loot, End> {
    match result {
        Ok(published) => Ok(Loot {
            end: End::Published {
                generation: published.generation,
                leased: published.lease.is_some(),
            },
            model: Some(Arc::new(Mutex::new(published.weights))),
            lease: published.lease,
        }),
        Err(PublishFailed::Publish(error)) => Err(End::NotPublished(error)),
        Err(other) => panic!("{other}"),
    }
}

fn contents(content: Content) -> Contents {
    let mut contents = Contents::new();
    contents
        .parameter("w", Dtype::U8, &[content.bytes])
        .expect("a tensor");
    contents.alias("tied", "w");
    contents
}

impl Engine {
    /// Its lease, which is not its own any more.
    pub fn lease(&mut self) -> Option<Lease> {
        self.lease.take()
    }

    /// Takes over what an engine in a thread came back with.
    fn takes(&mut self, loot: Loot) -> End {
        let (tells, events) = channel();
        if let Some(lease) = &loot.lease {
            lease.on_event(move |event| drop(tells.send(event.clone())));
        }
        (self.model, self.lease, self.events) = (loot.model, loot.lease, events);
        loot.end
    }

    fn comes_back(&mut self) -> Result<Loot, End> {
        // It may have gone by.
        let _ = self.goes_on.take().map(|goes_on| goes_on.send(()));
        let runs = self.runs.take().expect("it ends once");
        runs.join().expect("an engine")
    }
}

impl<C: Subject, S: Subject> Stage for Pair<C, S> {
    type Engine = Engine;
    type Stranger = Talk;

    fn start(daemon: Daemon) -> Pair<C, S> {
        let dir = tempfile::tempdir().expect("a directory");
        let device = Device::host(0);
        let role = weightd_core::content::Role::Target;
        let socket = weightd_socket::path::socket_path(dir.path(), &device.uuid(), None, None, role);
        let is_there = daemon.publish.is_some();
        let mut stage = Pair {
            client: Arc::new(C::start()),
            daemon,
            device,
            socket: socket.expect("a short path"),
            resident: None,
            impostor: None,
            server: PhantomData,
            dir,
        };
        if is_there {
            stage.open();
        }
        stage
    }

    fn load(&mut self, content: Content) -> Generation {
        if self.resident.is_none() {
            self.open();
        }
        let (info, given) = self.genuine(content);
        let publication = Publish {
            daemon: 0,
            generation: None,
            expects: Expects::Empty,
            key: self.daemon.key.clone(),
            content: info,
        };
        let descriptors = given.into_iter().map(talk::make).collect();
        self.resident().load(publication, descriptors)
    }

    fn digest(&mut self, digest: [u8; 32]) {
        let loader = self.resident().loader();
        loader.machine_mut().digest(Digest { daemon: 0, digest });
        loader.settle().expect("a launcher");
    }

    fn lose(&mut self) {
        self.resident().lose();
        self.settles("the content is lost", |status| status.bytes == 0);
    }

    fn reports(&mut self) -> usize {
        let events = self.resident().events();
        let reports = events.iter();
        reports
            .filter(|event| matches!(event, VaultEvent::ImportFailed { .. }))
            .count()
    }

    fn kill_server(&mut self) {
        self.resident().kill_server();
    }

    fn start_server(&mut self) {
        self.resident().start_server();
    }

    fn go(&mut self) {
        self.resident = None;
    }

    fn impersonate(&mut self, _sound: bool, act: Act) {
        self.go();
        self.impostor = None;
        self.impostor = Some(Impostor::start(&self.socket, act));
    }

    fn device(&self) -> DeviceUuid {
        self.device.uuid()
    }

    fn genuine(&self, content: Content) -> (ContentInfo, Vec<Given>) {
        let mut builder = ManifestBuilder::new();
        let region = builder.region(Region {
            handle: HandleKind::Memfd,
            bytes: content.bytes,
            device: self.device.uuid(),
            legacy: None,
        });
        let spec = TensorSpec {
            kind: TensorKind::Parameter,
            persistent: true,
            dtype: Dtype::U8,
            shape: &[content.bytes],
            strides: None,
            region,
            offset: 0,
        };
        builder.tensor("w", spec);
        builder.alias("tied", "w");
        let mut manifest = builder.finish().expect("a manifest").encode();
        if !content.sound {
            manifest.fill(0);
        }
        let info = ContentInfo {
            manifest_bytes: manifest.len() as u64,
            regions: vec![RegionInfo {
                handle: HandleKind::Memfd,
                bytes: content.bytes,
            }],
            tensors: 1,
            aliases: 1,
            checksums: false,
        };
        let region = Given::Sealed(vec![content.mark; content.bytes as usize]);
        (info, vec![Given::Sealed(manifest), region])
    }

    fn begin(&mut self, order: Order) -> Engine {
        self.set_out(order, None)
    }

    fn works(&mut self, engine: &mut Engine) {
        let works = engine.works.recv_timeout(PATIENCE);
        works.expect("it comes to its own work");
    }

    fn end(&mut self, engine: &mut Engine) -> End {
        match engine.comes_back() {
            Ok(loot) => engine.takes(loot),
            Err(end) => end,
        }
    }

    fn reload(&mut self, engine: &mut Engine, order: Order) -> End {
        let copies = order.mode == weightd_core::machine::Mode::Copy;
        let had = engine.model.clone().filter(|_| copies);
        match self.set_out(order, had).comes_back() {
            Ok(loot) => engine.takes(loot),
            Err(end) => end,
        }
    }

    fn reads(&self, engine: &Engine) -> u8 {
        let model = engine.model.as_ref().expect("a model");
        let weights = model.lock().expect("weights");
        let tensor = weights.get("w").expect("a tensor");
        let alias = weights.get("tied").expect("an alias");
        assert_eq!(tensor.address(), alias.address(), "another name for the same");
        let memory = tensor.host().expect("host memory");
        let bytes: Vec<u8> = tensor.runs(memory).flatten().copied().collect();
        let mark = bytes[0];
        assert!(bytes.iter().all(|byte| *byte == mark), "all of one content");
        mark
    }

    fn event(&mut self, engine: &mut Engine) -> LeaseEvent {
        match engine.events.recv_timeout(PATIENCE) {
            Ok(event) => event,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => panic!("nothing happens"),
        }
    }

    fn hears_late(&mut self, engine: &mut Engine) -> Option<LeaseEvent> {
        let (tells, events) = channel();
        let lease = engine.lease.as_ref().expect("a lease");
        lease.on_event(move |event| drop(tells.send(event.clone())));
        events.try_recv().ok()
    }

    fn is_lost(&self, engine: &Engine) -> bool {
        engine.lease.as_ref().expect("a lease").is_lost()
    }

    fn leave(&mut self, engine: Engine) {
        drop(engine);
    }

    fn ask(&mut self, question: Message) -> Result<Message, ErrorCode> {
        match request(&self.socket, question, Span::secs(60)) {
            Ok(answer) => Ok(answer),
            Err(RequestError::Ask {
                error: AskError::Failed { code, .. },
                ..
            }) => Err(code),
            Err(other) => panic!("{other}"),
        }
    }

    fn stranger(&mut self) -> Talk {
        Talk::new(connect(&self.socket).expect("a daemon").0)
    }

    fn says(&mut self, stranger: &mut Talk, bytes: &[u8], given: Vec<Given>) {
        stranger.says(bytes, given);
    }

    fn hears(&mut self, stranger: &mut Talk, frames: usize) -> Vec<Message> {
        let mut heard = Vec::new();
        while heard.len() < frames {
            talk::wait(&[&stranger.socket]);
            heard.extend(messages(stranger));
            assert!(
                heard.len() >= frames || !stranger.ended,
                "it heard {heard:?} only"
            );
        }
        heard
    }

    fn hears_the_end(&mut self, stranger: &mut Talk) -> Vec<Message> {
        let mut heard = Vec::new();
        while !stranger.ended {
            talk::wait(&[&stranger.socket]);
            heard.extend(messages(stranger));
        }
        heard
    }

    fn hangs_up(&mut self, stranger: Talk) {
        drop(stranger);
    }

    fn pass(&mut self, span: Span) {
        thread::sleep(Duration::from_micros(span.0));
    }
}

fn messages(talk: &mut Talk) -> impl Iterator<Item = Message> {
    let frames = talk.hears().into_iter();
    frames.map(|frame| Message::decode(frame.kind, &frame.body).expect("a message"))
}
