//! One round of everything that moves: time, connections, bytes and descriptors.

use super::{Raw, Side, World};
use crate::machine::{Exchange, Machine, Origin, Outgoing};
use crate::testing::ledger::Fd;

/// The bytes, and duplicates of the descriptors.
pub(super) fn copy(out: Outgoing<'_, Fd>) -> (Vec<u8>, Vec<Fd>) {
    let descriptors = out.descriptors.iter().map(Fd::duplicate);
    (out.bytes.to_vec(), descriptors.collect())
}

impl World {
    /// Whatever each process can do next; false when nothing moves any more.
    pub(super) fn turn(&mut self) -> bool {
        let now = self.now;
        let mut moved = false;
        self.sweep_closed();
        moved |= self.server.as_mut().is_some_and(|server| server.tick(now));
        moved |= self.vault.as_mut().is_some_and(|vault| vault.tick(now));
        moved |= self.accept();
        self.sweep_closed();
        for engine in 0..self.engines.len() {
            moved |= self.step(engine);
        }
        // Under chaos, whoever could move may be late; the world rests when nobody could.
        moved |= (self.dice.is_some() && self.exchange(true)) || self.exchange(false);
        self.sweep_closed();
        moved | self.reap()
    }

    /// Every end writes and reads once, unless it is late.
    fn exchange(&mut self, may_be_late: bool) -> bool {
        let mut moved = false;
        let wires = &self.wires;
        self.live
            .retain(|wire| wires[*wire].ends != [Side::Gone, Side::Gone]);
        let mut live = self.live.clone();
        let first = self.dice.as_mut().map_or(0, |dice| dice.roll(live.len()));
        live.rotate_left(first);
        for wire in live {
            for end in 0..2 {
                let late = may_be_late && self.dice.as_mut().is_some_and(|dice| dice.roll(4) == 0);
                if !late {
                    moved |= self.write(wire, end);
                    moved |= self.read(wire, end);
                }
            }
        }
        moved
    }

    fn accept(&mut self) -> bool {
        let now = self.now;
        if self.impostor.is_some() {
            return self.accept_as_impostor();
        }
        let Some(server) = self.server.as_mut() else {
            return false;
        };
        let mut moved = false;
        for wire in std::mem::take(&mut self.backlog) {
            let Side::Backlog(daemon) = self.wires[wire].ends[1] else {
                continue;
            };
            if server.accepting && server.listening.contains_key(&daemon) {
                let peer = self.wires[wire].client;
                let conn = server.input(|server| server.accept(now, Origin::Daemon(daemon), peer));
                self.wires[wire].ends[1] = Side::Server(conn);
                moved = true;
            } else {
                self.backlog.push_back(wire);
            }
        }
        moved
    }

    fn accept_as_impostor(&mut self) -> bool {
        let accepted: Vec<usize> = self.backlog.drain(..).collect();
        let moved = !accepted.is_empty();
        for &wire in &accepted {
            self.wires[wire].ends[1] = Side::Raw;
            let raw = Raw {
                end: 1,
                ..Raw::default()
            };
            self.raws.insert(wire, raw);
        }
        self.impostor.get_or_insert_default().extend(accepted);
        moved
    }

    fn reap(&mut self) -> bool {
        if self.hold_reaper {
            return false;
        }
        let now = self.now;
        let mut moved = false;
        macro_rules! reap {
            ($host:expr) => {
                if let Some(host) = $host.as_mut() {
                    for (id, fd) in std::mem::take(&mut host.discards) {
                        fd.close();
                        host.input(|machine| machine.discarded(now, id));
                        moved = true;
                    }
                }
            };
        }
        reap!(self.server);
        reap!(self.vault);
        moved
    }

    fn sweep_closed(&mut self) {
        let server = self
            .server
            .as_mut()
            .map(|host| std::mem::take(&mut host.closing))
            .unwrap_or_default();
        let vault = self
            .vault
            .as_mut()
            .map(|host| std::mem::take(&mut host.closing))
            .unwrap_or_default();
        if server.is_empty() && vault.is_empty() {
            return;
        }
        self.close_all(|side| match side {
            Side::Server(conn) => server.contains(&conn),
            Side::Vault(conn) => vault.contains(&conn),
            _ => false,
        });
    }

    fn outgoing(&mut self, side: Side) -> Option<(Vec<u8>, Vec<Fd>)> {
        macro_rules! of_host {
            ($host:expr, $conn:expr) => {{
                let host = $host.as_ref()?;
                let out = host.machine.outgoing($conn);
                if let Some(interest) = host.interest.get(&$conn) {
                    assert_eq!(
                        interest.1,
                        out.is_some(),
                        "who has something to send wants to write"
                    );
                }
                out.map(copy)
            }};
        }
        match side {
            Side::Server(conn) => of_host!(self.server, conn),
            Side::Vault(conn) => of_host!(self.vault, conn),
            Side::Loader => self.loader.as_ref()?.outgoing().map(copy),
            Side::Engine(engine) => self.engines[engine].outgoing(),
            Side::Adopter => unreachable!("an adopter is asked by its connection"),
            Side::Gone | Side::Backlog(_) | Side::Raw => None,
        }
    }

    fn write(&mut self, wire: usize, end: usize) -> bool {
        let (now, side) = (self.now, self.wires[wire].ends[end]);
        if side == Side::Raw {
            return self.write_raw(wire);
        }
        let outgoing = match self.adopters.get(&wire) {
            Some(adopt) if side == Side::Adopter => {
                adopt.outgoing().map(|out| (out.bytes.to_vec(), Vec::new()))
            }
            None if side == Side::Adopter => None,
            _ => self.outgoing(side),
        };
        let Some((bytes, descriptors)) = outgoing else {
            return false;
        };
        if self.wires[wire].pipes[end].broken {
            // What the other end said before it closed is read first, by who still reads.
            let unread = !self.wires[wire].pipes[1 - end].is_empty() && self.wants_to_read(wire, end);
            if !unread {
                self.hang(wire, end);
            }
            return !unread;
        }
        let room = self.wires[wire].pipes[end].room().min(bytes.len());
        if room == 0 {
            return false;
        }
        let sent = self.dice.as_mut().map_or(room, |dice| 1 + dice.roll(room));
        self.wires[wire].pipes[end].write(&bytes[..sent], descriptors);
        match side {
            Side::Server(conn) => self
                .server
                .as_mut()
                .unwrap()
                .input(|server| server.wrote(now, conn, sent)),
            Side::Vault(conn) => self
                .vault
                .as_mut()
                .unwrap()
                .input(|vault| vault.wrote(now, conn, sent)),
            Side::Loader => self.loader.as_mut().unwrap().wrote(now, sent),
            Side::Engine(engine) => self.engines[engine].wrote(now, sent),
            Side::Adopter => self.adopters.get_mut(&wire).unwrap().wrote(now, sent),
            Side::Gone | Side::Backlog(_) | Side::Raw => unreachable!("these have nothing to send"),
        }
        self.sweep_closed();
        true
    }

    fn write_raw(&mut self, wire: usize) -> bool {
        let Some(raw) = self.raws.get_mut(&wire) else {
            return false;
        };
        let pipe = &mut self.wires[wire].pipes[raw.end];
        if pipe.broken {
            return !std::mem::take(&mut raw.out).is_empty();
        }
        let room = pipe.room();
        let Some((bytes, descriptors)) = raw.out.front_mut() else {
            return false;
        };
        let sent = bytes.len().min(room);
        if sent == 0 {
            return false;
        }
        let rest = bytes.split_off(sent);
        pipe.write(bytes, std::mem::take(descriptors));
        if rest.is_empty() {
            raw.out.pop_front();
        } else {
            *bytes = rest;
        }
        true
    }

    fn wants_to_read(&mut self, wire: usize, end: usize) -> bool {
        let now = self.now;
        match self.wires[wire].ends[end] {
            Side::Gone | Side::Backlog(_) => false,
            Side::Server(conn) => self
                .server
                .as_ref()
                .is_some_and(|server| server.interest[&conn].0),
            Side::Vault(conn) => self.vault.as_ref().is_some_and(|vault| vault.interest[&conn].0),
            Side::Loader => true,
            Side::Engine(engine) => !self.engines[engine].works(),
            Side::Raw => !self.raws[&wire].deaf,
            // What comes after the answer is for the vault.
            Side::Adopter => self
                .adopters
                .get_mut(&wire)
                .is_some_and(|adopt| !adopt.is_over(now)),
        }
    }

    fn read(&mut self, wire: usize, end: usize) -> bool {
        if !self.wants_to_read(wire, end) {
            return false;
        }
        let (now, side) = (self.now, self.wires[wire].ends[end]);
        let pipe = &mut self.wires[wire].pipes[1 - end];
        if pipe.is_empty() {
            let ended = pipe.ended;
            if ended {
                self.hang(wire, end);
            }
            return ended;
        }
        let most = self.dice.as_mut().map_or(65_536, |dice| match dice.roll(3) {
            0 => 1 + dice.roll(3),
            1 => 1 + dice.roll(100),
            _ => 65_536,
        });
        let (bytes, descriptors) = pipe.read(most);
        match side {
            Side::Server(conn) => {
                let strict = descriptors.into_iter().map(|(facts, fd)| (facts, fd.strict()));
                let server = self.server.as_mut().unwrap();
                server.input(|server| server.receive(now, conn, &bytes, strict, false));
            }
            Side::Vault(conn) => {
                let strict = descriptors.into_iter().map(|(facts, fd)| (facts, fd.strict()));
                let vault = self.vault.as_mut().unwrap();
                vault.input(|vault| vault.receive(now, conn, &bytes, strict, false));
            }
            Side::Loader => self
                .loader
                .as_mut()
                .unwrap()
                .receive(now, &bytes, descriptors, false),
            Side::Engine(engine) => self.engines[engine].receive(now, &bytes, descriptors),
            Side::Adopter => {
                let adopt = self.adopters.get_mut(&wire).unwrap();
                adopt.receive(now, &bytes, descriptors, false);
            }
            Side::Raw => {
                let raw = self.raws.get_mut(&wire).unwrap();
                raw.decoder
                    .push(&bytes, descriptors, false)
                    .expect("a host frames well");
                while let Some(frame) = raw.decoder.next_frame().expect("a host frames well") {
                    raw.heard.push(frame);
                }
            }
            Side::Gone | Side::Backlog(_) => unreachable!("these read nothing"),
        }
        if let Some(loader) = self.loader.as_mut() {
            self.published.extend(std::iter::from_fn(|| loader.poll()));
        }
        self.sweep_closed();
        true
    }

    /// One end notices that the other is gone.
    fn hang(&mut self, wire: usize, end: usize) {
        let (now, side) = (self.now, self.wires[wire].ends[end]);
        match side {
            Side::Server(conn) => self
                .server
                .as_mut()
                .unwrap()
                .input(|server| server.hangup(now, conn)),
            Side::Vault(conn) => self
                .vault
                .as_mut()
                .unwrap()
                .input(|vault| vault.hangup(now, conn)),
            Side::Loader => {
                let loader = self.loader.as_mut().unwrap();
                loader.hangup(now, "the launcher has ended");
                self.published.extend(std::iter::from_fn(|| loader.poll()));
            }
            Side::Engine(engine) => self.engines[engine].hangup(now),
            Side::Raw => self.raws.get_mut(&wire).unwrap().ended = true,
            Side::Adopter => self.adopters.get_mut(&wire).unwrap().hangup(now, "it is gone"),
            Side::Gone | Side::Backlog(_) => unreachable!("these notice nothing"),
        }
        self.close_end(wire, end);
        self.sweep_closed();
    }
}
