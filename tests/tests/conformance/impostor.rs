//! Somebody who listens where a daemon should.

use crate::stage::{Act, Reaction};
use crate::talk::{Talk, wait};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread::{self, JoinHandle};
use weightd_core::wire::Message;
use weightd_socket::connect::pair;

/// It goes when this is dropped.
pub struct Impostor {
    until: Option<OwnedFd>,
    runs: Option<JoinHandle<()>>,
}

impl Impostor {
    pub fn start(socket: &Path, act: Act) -> Impostor {
        let _ = std::fs::remove_file(socket);
        let listener = UnixListener::bind(socket).expect("a socket");
        let (until, over) = pair().expect("a pair of sockets");
        Impostor {
            until: Some(until),
            runs: Some(thread::spawn(move || listen(&listener, &over, act))),
        }
    }
}

fn listen(listener: &UnixListener, over: &OwnedFd, mut act: Act) {
    let mut talks: Vec<Talk> = Vec::new();
    loop {
        let mut descriptors: Vec<&dyn std::os::fd::AsFd> = vec![over, listener];
        descriptors.extend(talks.iter().map(|talk| &talk.socket as &dyn std::os::fd::AsFd));
        let ready = wait(&descriptors);
        if ready[0] {
            return;
        }
        for (talk, _) in talks.iter_mut().zip(&ready[2..]).filter(|(_, ready)| **ready) {
            for frame in talk.hears() {
                let message = Message::decode(frame.kind, &frame.body).expect("engines say messages");
                react(talk, act(Some((&message, frame.request))));
            }
        }
        if ready[1] {
            let (stream, _) = listener.accept().expect("a connection");
            let mut talk = Talk::new(stream.into());
            react(&mut talk, act(None));
            talks.push(talk);
        }
        talks.retain(|talk| !talk.ended);
    }
}

fn react(talk: &mut Talk, reaction: Reaction) {
    talk.says(&reaction.says, reaction.gives);
    talk.ended |= reaction.ends;
    if !reaction.floods.is_empty() {
        let mut stream = UnixStream::from(talk.socket.try_clone().expect("a descriptor"));
        stream.set_nonblocking(false).expect("a socket that waits");
        // It ends with who listens.
        thread::spawn(move || while stream.write_all(&reaction.floods).is_ok() {});
    }
}

impl Drop for Impostor {
    fn drop(&mut self) {
        drop(self.until.take());
        if let Some(runs) = self.runs.take() {
            let ended = runs.join();
            assert!(ended.is_ok() || thread::panicking(), "the impostor fails");
        }
    }
}
