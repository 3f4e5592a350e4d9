#!/bin/sh
# The Cleave agent in Termux: installs it, or repairs an unfinished installation, and starts it.
#
#   sh bootstrap.sh [--boot] [--wake-lock] 'cleave://...' [options of the agent]
#   sh bootstrap.sh update                                 another agent with the same options
#   cleave-agent start | stop | status | rules | update | log | boot on | boot off | uninstall [--packages]
#
# The server that hands out this script has written its address and the bundle's checksum into it. POSIX sh; every step
# first checks whether it is done, and a file is moved into place when it is complete: run it again after any failure.
# In a proot (or on any Linux) there is no pkg: python3, numpy and pyzmq must be installed; the rest is the same.
# A loop of this script, the launcher, starts the agent and restores the previous bundle when a new one does
# not start. It runs none of the bundle's code, and an update of the agent does not replace it.
set -u

URL='@URL@'
SHA256='@SHA256@'
folder="${CLEAVE_HOME:-$HOME/.cleave}"
boot_script="$HOME/.termux/boot/cleave-agent"
bin="${PREFIX:-$HOME/.local}/bin"
command="$bin/cleave-agent"
invitation="$folder/invitation"
export CLEAVE_AGENT_STATE="$folder/state" CLEAVE_RULES="$folder/owner.toml" # removed together with the agent
export ORT_DISABLE_TELEMETRY=1 # else ONNX Runtime writes an ID into your files as soon as it is loaded

say() { printf 'cleave: %s\n' "$*"; }

fail() {
    printf 'cleave: %s\n' "$*" >&2
    exit 1
}

usage() {
    fail "what shall it do? sh bootstrap.sh 'cleave://...' installs and starts the agent with an invitation; afterwards
there is: cleave-agent start | stop | status | rules | update | log | boot on | boot off | uninstall"
}

main() {
    case "${1-}" in
        start) start_agent ;;
        stop) stop_agent ;;
        status | rules) ask_agent "$@" ;;
        log) show_log ;;
        boot) boot "${2-}" ;;
        uninstall) uninstall "${2-}" ;;
        update) update_all ;;
        launch) launch ;; # by start_agent, in the background
        *) install_all "$@" ;;
    esac
}

# ---- installing

install_all() {
    want_boot='' want_lock=''
    while :; do
        case "${1-}" in
            --boot) want_boot=yes ;;
            --no-boot) want_boot=no ;;
            --wake-lock) want_lock=yes ;;
            --no-wake-lock) want_lock=no ;;
            *) break ;;
        esac
        shift
    done
    case "${1-}" in
        cleave://*) server=--invitation ;;
        "$invitation") server=--invitation-file ;; # update_all: what it was installed with
        tcp://*) server=--ps ;;
        *) usage ;;
    esac
    case "$SHA256" in *@*) fail "this copy does not know where the agent is: use the command that the invitation gives" ;; esac
    mkdir -p "$folder" 2>/dev/null || explain "making the folder $folder" ""
    chmod 700 "$folder"
    install_packages
    fetch_bundle
    install_command
    self_test
    if [ "$server" = --invitation ]; then # in a file, which the agent removes when the server knows this phone
        remember "$invitation" "$1"
        server=--invitation-file
        shift
        set -- "$invitation" "$@"
    fi
    remember "$folder/options" "$server" "$@"
    remember "$folder/kernel" ${kernel:+"$kernel"}
    offer_boot "$want_boot"
    offer_wake_lock "$want_lock"
    if [ -n "$changed" ] && running; then stop_agent; fi
    start_agent
    say "done. To leave: cleave-agent stop; to remove everything: cleave-agent uninstall"
}

# What went wrong while doing $1, in words; $2 is what the failed program said.
explain() {
    case "$2" in
        *[Nn]"o space left"* | *"enough free space"*) full=yes ;;
        *) if has_room; then full=''; else full=yes; fi ;;
    esac
    [ -z "$full" ] || fail "the disk is full: $1 failed. Nothing is broken. Make room (about 500 MB for Python and the \
rest, 1 MB for the agent itself) and run the same command again."
    case "$2" in
        *resolve* | *fetch* | *onnect* | *mirrors* | *timed\ out* | *unreachable* | *transfer\ closed* | *reset\ by\ peer* | *rror:\ 404*)
            fail "no network, or it broke off: $1 failed ($(printf '%s' "$2" | tail -n 1)). What is done so far stays. Check \
Wi-Fi or the cable and run the same command again."
            ;;
    esac
    fail "$1 failed: $(printf '%s' "$2" | tail -n 3). Try 'pkg upgrade', then run the same command again."
}

has_room() {
    if head -c 1048576 /dev/zero >"$folder/.room" 2>/dev/null; then
        rm -f "$folder/.room"
    else
        rm -f "$folder/.room"
        return 1
    fi
}

find_python() { python=$(command -v python || command -v python3 || echo python); }

loads() { "$python" -c "import $1" >/dev/null 2>&1; }

install_packages() {
    find_python
    if ! command -v pkg >/dev/null; then
        if loads numpy && loads zmq; then return; fi
        fail "this is not Termux, and Python's numpy and pyzmq are not there. In a proot Debian: apt install python3-numpy \
python3-zmq; elsewhere: pip install numpy pyzmq. Then run the same command again."
    fi
    if loads "numpy, zmq, onnxruntime"; then return; fi # the quick way, when it runs again
    if command -v dpkg >/dev/null && [ -n "$(dpkg --audit 2>/dev/null)" ]; then
        say "an earlier installation broke off: mending it"
        said=$(dpkg --configure -a 2>&1) || explain "mending Termux's packages (dpkg --configure -a)" "$said"
    fi
    command -v python >/dev/null || package python "Python"
    find_python
    if ! loads numpy; then
        package python-numpy "NumPy"
        loads numpy || fail "NumPy is installed but does not load. Try 'pkg upgrade', then run the same command again."
    fi
    install_zmq
    if ! loads onnxruntime; then
        say "installing ONNX Runtime; without it NumPy does the work"
        if said=$(pkg install -y python-onnxruntime 2>&1 </dev/null); then
            note_package python-onnxruntime
        else
            say "ONNX Runtime could not be installed: $(printf '%s' "$said" | tail -n 1)"
        fi
    fi
}

package() {
    say "installing $2; a minute or two"
    said=$(pkg install -y "$1" 2>&1 </dev/null) || explain "installing $2 (pkg install $1)" "$said"
    note_package "$1"
}

note_package() { # for uninstall
    grep -qx "$1" "$folder/packages" 2>/dev/null || printf '%s\n' "$1" >>"$folder/packages"
}

install_zmq() { # Termux has no package of it; PyPI has wheels for Android since pyzmq 27.0.1
    loads zmq && return
    "$python" -m pip --version >/dev/null 2>&1 || package python-pip "pip"
    say "installing pyzmq"
    if ! said=$("$python" -m pip install --no-input --only-binary :all: pyzmq 2>&1); then
        case "$said" in
            *"onnection broken"*) explain "installing pyzmq (pip install pyzmq)" "cannot connect" ;; # pip's last words mislead
            *"o matching distribution"*)
                say "no ready-made pyzmq for this Python: building it, five to ten minutes"
                for tool in libzmq clang cmake ninja; do package "$tool" "$tool"; done
                said=$("$python" -m pip install --no-input pyzmq 2>&1) || explain "building pyzmq" "$said"
                ;;
            *) explain "installing pyzmq (pip install pyzmq)" "$said" ;;
        esac
    fi
    loads zmq || fail "pyzmq is installed but does not load. Try 'pkg upgrade', then run the same command again."
}

checksum() { sha256sum "$1" 2>/dev/null | cut -d ' ' -f 1; }

fetch_bundle() {
    changed=''
    if [ "$(checksum "$folder/agent.zip")" = "$SHA256" ]; then
        say "the agent is there already"
        return
    fi
    part="$folder/agent.zip.part"
    if [ "$(checksum "${CLEAVE_BUNDLE:-/nowhere}")" = "$SHA256" ]; then
        said=$(cp "$CLEAVE_BUNDLE" "$part" 2>&1) || explain "copying the agent" "$said"
    else
        command -v curl >/dev/null || package curl "curl"
        said=$(curl -fsS --connect-timeout 10 --max-time 300 --retry 2 -o "$part" "$URL/agent.zip" 2>&1) ||
            explain "fetching $URL/agent.zip" "$said"
    fi
    if [ "$(checksum "$part")" != "$SHA256" ]; then
        rm -f "$part"
        fail "what came from $URL/agent.zip is not what the invitation promised (wrong checksum): it was thrown away. \
Ask for a new invitation; if it happens again, the network changes what you fetch."
    fi
    rm -f "$folder/agent.zip.trial" # installed by hand: no trial
    said=$(mv -f "$part" "$folder/agent.zip" 2>&1) || explain "putting the agent in its place" "$said"
    changed=yes
    say "the agent is there, checksum verified ($(wc -c <"$folder/agent.zip" | tr -d ' ') bytes)"
}

install_command() {
    mkdir -p "$bin"
    {
        printf '#!%s\n' "$(command -v sh)" &&
            "$python" -c 'import sys, zipfile; print(zipfile.ZipFile(sys.argv[1]).read("bootstrap.sh").decode(), end="")' \
                "$folder/agent.zip" | tail -n +2
    } >"$command.part" 2>/dev/null || explain "writing $command" ""
    [ "$(wc -l <"$command.part")" -gt 100 ] || explain "writing $command" ""
    chmod 700 "$command.part"
    mv -f "$command.part" "$command" || explain "writing $command" ""
}

# A broken ONNX Runtime raises, computes wrongly or takes the whole process with it; the last is why this is a process.
self_test() {
    kernel=''
    test_code='from agent.compute.kernels import available_kernels
kernels, rejected = available_kernels()
print("works:", *[kernel.name for kernel in kernels])
print("rejected:", *rejected.values())'
    if said=$(PYTHONPATH="$folder/agent.zip" "$python" -c "$test_code" 2>/dev/null); then
        case "$said" in
            *"works: numpy onnxruntime"*) say "self-test: ONNX Runtime and NumPy compute correctly; the faster one is used" ;;
            *) say "self-test: NumPy is used; not ONNX Runtime: $(printf '%s\n' "$said" | sed -n 's/^rejected: //p')" ;;
        esac
        return
    fi
    kernel=numpy
    said=$(PYTHONPATH="$folder/agent.zip" "$python" -c 'import agent.compute.kernels' 2>&1) ||
        fail "self-test: the agent does not load: $(printf '%s' "$said" | tail -n 1). Try 'pkg upgrade', then run the same \
command again."
    say "self-test: NumPy is used; not ONNX Runtime: its test crashed"
}

remember() { # in file $1, one word per line
    file="$1"
    shift
    {
        for word in "$@"; do printf '%s\n' "$word" || break; done
    } >"$file.part" 2>/dev/null || explain "writing $file" ""
    chmod 600 "$file.part"
    if ! cmp -s "$file.part" "$file"; then changed=yes; fi
    mv -f "$file.part" "$file"
}

update_all() { # with the bundle that belongs to this script; the phone's own copy: with the waiting one
    [ -s "$folder/options" ] || usage
    case "$SHA256" in
        *@*)
            was_running=''
            if running; then
                was_running=yes
                stop_agent
            fi
            if ask_agent update; then
                start_agent
                return
            fi
            [ -z "$was_running" ] || start_agent
            exit 1
            ;;
    esac
    set --
    while IFS= read -r option; do set -- "$@" "$option"; done <"$folder/options"
    shift # --invitation-file or --ps
    install_all "$@"
}

# ---- settings that Android would otherwise decide

ask() { # yes or no; no if there is no terminal
    if [ -n "$1" ]; then
        [ "$1" = yes ]
        return
    fi
    (: </dev/tty) 2>/dev/null || return 1
    printf 'cleave: %s [y/N] ' "$2" >/dev/tty
    IFS= read -r answer </dev/tty || return 1
    case "$answer" in [yY]*) return 0 ;; *) return 1 ;; esac
}

offer_boot() {
    command -v pkg >/dev/null || return 0
    if [ -e "$boot_script" ] && [ "$1" != no ]; then return; fi
    if ask "$1" "Start the agent when the phone starts (needs the Termux:Boot app)?"; then
        boot on
    else
        rm -f "$boot_script"
        say "it does not start with the phone; if it shall: cleave-agent boot on"
    fi
}

offer_wake_lock() {
    command -v termux-wake-lock >/dev/null || return 0
    if [ -e "$folder/wake-lock" ] && [ "$1" != no ]; then return; fi
    if ask "$1" "Keep the processor awake while the agent runs (wake lock)? Otherwise it sleeps with the screen."; then
        : >"$folder/wake-lock"
    else
        rm -f "$folder/wake-lock"
        say "no wake lock: Android lets the agent sleep when the screen is off"
    fi
}

boot() {
    case "$1" in
        on)
            mkdir -p "$(dirname "$boot_script")"
            printf '#!%s\nexec %s start\n' "$(command -v sh)" "$command" >"$boot_script.part" 2>/dev/null ||
                explain "writing $boot_script" ""
            chmod 700 "$boot_script.part" && mv -f "$boot_script.part" "$boot_script"
            say "it starts with the phone, once the Termux:Boot app is installed and has been opened one time"
            ;;
        off)
            rm -f "$boot_script"
            say "it does not start with the phone"
            ;;
        *) usage ;;
    esac
}

# ---- running

running() { # sets pid: the agent's, or its launcher's while that one starts it
    is_process agent ' -m agent ' || is_process launcher ' launch '
}

is_process() { # sets pid to that in $1.pid; a number that now belongs to something else does not count
    pid=$(cat "$folder/$1.pid" 2>/dev/null) || return 1
    alive "$pid" && tr '\0' ' ' <"/proc/$pid/cmdline" | grep -q -- "$2"
}

alive() { # a process that ended and was not waited for does not count
    case "$(cat "/proc/$1/stat" 2>/dev/null)" in '' | *") Z "*) return 1 ;; *) return 0 ;; esac
}

start_agent() {
    if [ ! -s "$folder/agent.zip" ] || [ ! -s "$folder/options" ]; then usage; fi
    if running; then
        say "the agent runs already (process $pid)"
        return
    fi
    find_python
    if [ -e "$folder/wake-lock" ]; then termux-wake-lock || say "the wake lock was refused; it goes on without"; fi
    [ ! -e "$folder/agent.log" ] || mv -f "$folder/agent.log" "$folder/agent.log.1"
    rm -f "$folder/agent.pid"
    nohup "$(command -v sh)" "$command" launch </dev/null >"$folder/agent.log" 2>&1 &
    pid=$!
    printf '%s\n' "$pid" >"$folder/launcher.pid" || explain "writing $folder/launcher.pid" ""
    say "the agent has started (process $pid); waiting for the server"
    waited=0
    while [ "$waited" -lt 300 ]; do
        if ! alive "$pid"; then
            rm -f "$folder/agent.pid" "$folder/launcher.pid"
            fail "the agent ended at once: $(tail -n 3 "$folder/agent.log")"
        fi
        if found=$(grep -m 1 -e ' joined ' -e ' not working: ' "$folder/agent.log"); then
            say "$(grep -m 1 ' kernel ' "$folder/agent.log" | cut -d ' ' -f 2-)"
            case "$found" in
                *" joined "*) say "${found#* }: this phone works now" ;;
                *) say "${found#* }; it begins by itself when it may (cleave-agent rules)" ;;
            esac
            return
        fi
        sleep 0.2
        waited=$((waited + 1))
    done
    say "no word from the server yet; it goes on trying. Its last words: $(tail -n 1 "$folder/agent.log")"
}

stop_agent() {
    if running; then
        if is_process launcher ' launch '; then kill "$pid"; fi # it passes it on, and does not start another
        waited=0
        while running; do
            if ! is_process launcher ' launch ' && running; then kill "$pid"; fi
            sleep 0.2
            waited=$((waited + 1))
            [ "$waited" -lt 50 ] || break
        done
        if is_process launcher ' launch '; then kill -9 "$pid"; fi
        if is_process agent ' -m agent '; then kill -9 "$pid"; fi
        say "the agent has left"
    else
        say "the agent was not running"
    fi
    rm -f "$folder/agent.pid" "$folder/launcher.pid"
    if [ -e "$folder/wake-lock" ]; then termux-wake-unlock 2>/dev/null; fi
    return 0
}

# ---- the launcher

tries_at_most=2
start_s="${CLEAVE_START_S:-120}" # from its start to joining; measuring the phone, once, takes up to 90 s
settle_s="${CLEAVE_SETTLE_S:-5}" # then it must not crash for this long

launch() { # run the agent, and after an update the new one; see agent/identity/bundle_file.py for the files beside the bundle
    find_python
    cd "$folder" || fail "there is no folder $folder" # Python looks for modules in the current folder first
    child='' stopping='' tries=0
    trap 'stopping=yes; stop_child' TERM INT
    while :; do
        read_trial
        code=''
        rm -f "$folder/agent.zip.started"
        set --
        while IFS= read -r option; do set -- "$@" "$option"; done <"$folder/options"
        if [ -s "$folder/kernel" ]; then set -- "$@" --kernel "$(cat "$folder/kernel")"; fi
        CLEAVE_LAUNCHER=1 PYTHONPATH="$folder/agent.zip" "$python" -m agent "$@" &
        child=$!
        printf '%s\n' "$child" >"$folder/agent.pid"
        if [ -n "$stopping" ]; then stop_child; fi
        if [ -n "$trial" ]; then
            if watch_trial; then
                end_trial
            elif [ -z "$stopping" ]; then
                kill -9 "$child" 2>/dev/null
                wait "$child" 2>/dev/null
                tries=$((tries + 1))
                say "release $trial does not start (try $tries of $tries_at_most)"
                [ "$tries" -lt "$tries_at_most" ] || roll_back
                continue
            fi
        fi
        while [ -z "$code" ] || alive "$child"; do # a signal interrupts a wait
            wait "$child"
            code=$?
        done
        if [ "$code" != 76 ] || [ -n "$stopping" ] || [ ! -s "$folder/agent.zip.trial" ]; then exit "$code"; fi
    done
}

stop_child() { # not before it is the agent: while it is still a copy of this shell it would forget the signal
    [ -n "$child" ] || return 0
    while alive "$child" && ! tr '\0' ' ' 2>/dev/null <"/proc/$child/cmdline" | grep -q -- ' -m agent '; do sleep 0.1; done
    kill "$child" 2>/dev/null
}

read_trial() { # sets trial: the number of a new bundle that has not proven itself
    trial=''
    [ -s "$folder/agent.zip.trial" ] || return 0
    read -r trial sum <"$folder/agent.zip.trial"
    if [ "$(checksum "$folder/agent.zip")" != "$sum" ]; then # interrupted before it was put in place
        trial=''
        rm -f "$folder/agent.zip.trial"
    fi
}

watch_trial() { # true: it got as far as joining and went on, or ended in good order; sets code if it has ended
    waited=0
    until [ "$(cat "$folder/agent.zip.started" 2>/dev/null)" = "$trial" ]; do
        if [ "$waited" -ge $((5 * start_s)) ] || ! alive "$child"; then return 1; fi
        sleep 0.2
        waited=$((waited + 1))
    done
    waited=0
    while alive "$child"; do
        [ "$waited" -lt $((5 * settle_s)) ] || return 0
        sleep 0.2
        waited=$((waited + 1))
    done
    wait "$child"
    code=$?
    case "$code" in 0 | 2 | 76) return 0 ;; *) return 1 ;; esac
}

end_trial() {
    tries=0
    if grep -q "^$trial " "$folder/agent.zip.trial"; then rm -f "$folder/agent.zip.trial"; fi # not that of yet another one
    say "release $trial has started and stays"
}

roll_back() {
    tries=0
    [ -s "$folder/agent.zip.previous" ] || fail "and there is none from before: run the command of a new invitation"
    printf '%s\n' "$trial" >>"$folder/agent.zip.bad"
    mv -f "$folder/agent.zip.previous" "$folder/agent.zip" || fail "and the one from before cannot be put back"
    rm -f "$folder/agent.zip.trial"
    say "release $trial was rolled back; the one from before goes on"
}

ask_agent() {
    [ -s "$folder/agent.zip" ] || fail "the agent is not installed"
    find_python
    (cd "$folder" && PYTHONPATH="$folder/agent.zip" "$python" -m agent "$@")
}

show_log() {
    for log in "$folder/agent.log.1" "$folder/agent.log"; do
        [ ! -e "$log" ] || cat "$log"
    done
}

uninstall() {
    stop_agent
    packages=$(tr '\n' ' ' <"$folder/packages" 2>/dev/null)
    if [ "$1" = --packages ] && [ -n "$packages" ]; then
        # shellcheck disable=SC2086 # several words are meant
        said=$(pkg uninstall -y $packages 2>&1) || explain "removing $packages" "$said"
        packages=''
    fi
    rm -rf "$folder"
    rm -f "$boot_script" "$boot_script.part" "$command.part" "$command"
    rmdir "$HOME/.termux/boot" 2>/dev/null
    if grep -qs "^# The Cleave agent in Termux" "$HOME/bootstrap.sh"; then rm -f "$HOME/bootstrap.sh"; fi
    say "everything of the agent is removed${packages:+, except packages that came with it; if nothing else needs them: pkg uninstall $packages}"
}

main "$@"
