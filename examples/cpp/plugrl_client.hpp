// A client of the wire protocol, version 1: runs environments on the actions a server sends.
//
// Derive from Env, fill Options, call run(); it returns the exit code: 0 finished, 1 the server broke the
// protocol or refused, 3 no server in reach. Nothing that travels is trusted.
#pragma once

#include <charconv>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <memory>
#include <optional>
#include <thread>

#include "msgpack.hpp"
#include "websocket.hpp"

namespace plugrl {

struct Image {
    std::size_t height = 0, width = 0, channels = 0;
    std::string pixels;  // height * width * channels bytes, C order
    bool operator==(const Image& o) const {
        return height == o.height && width == o.width && channels == o.channels && pixels == o.pixels;
    }
};

// What one env sees. Every env of a run has the same names and sizes.
struct Observation {
    std::vector<std::pair<std::string, Image>> images;
    std::vector<std::pair<std::string, std::vector<double>>> states;
    std::string text;  // the task, ASCII
    bool operator==(const Observation& o) const { return images == o.images && states == o.states && text == o.text; }
};

struct Outcome {
    double reward = 0;
    bool terminated = false, truncated = false;
};

class Env {
  public:
    virtual ~Env() = default;
    virtual void reset() = 0;
    virtual Outcome step(const std::vector<double>& action) = 0;
    virtual Observation observe() const = 0;
    // The number of action dimensions, as soon as it is known; throw WireError if it does not fit.
    virtual void use_action_dim(std::size_t dim) = 0;
    // Bytes of a state's floats on the wire: 4 or 8.
    virtual int state_bytes() const { return 4; }
    virtual bool succeeded() const { return false; }
};

struct Options {
    std::string host = "127.0.0.1";
    int port = 8000;
    std::size_t num_envs = 4;
    std::uint64_t episodes = 20;   // over all envs
    std::size_t replan_steps = 0;  // prefix of each chunk to use, 0 for all of it
    std::uint64_t seed = 0;
    std::string api_key;
    int reconnect_limit = 8;  // fruitless connections in a row
    bool wait_for_next_run = false;
    bool reuse = true, chunk_steps = true;

    static constexpr const char* usage =
        "known: --host --port --num-envs --episodes --replan-steps --seed --api-key --reconnect-limit"
        " --wait-for-next-run --no-reuse --no-chunk-steps --help\n";

    // Reads --name value pairs; exits with 2 on what it does not know or cannot mean. `other` may claim a flag first.
    template <typename Other>
    static Options parse(int argc, char** argv, Other other) {
        Options o;
        if (const char* key = std::getenv("PLUGRL_API_KEY")) o.api_key = key;
        for (int i = 1; i < argc; ++i) {
            const std::string flag = argv[i];
            if (flag == "--wait-for-next-run") {
                o.wait_for_next_run = true;
            } else if (flag == "--no-reuse") {
                o.reuse = false;
            } else if (flag == "--no-chunk-steps") {
                o.chunk_steps = false;
            } else if (flag == "--help") {
                std::cout << usage;
                std::exit(0);
            } else if (i + 1 == argc || !(other(flag, argv[i + 1]) || o.set(flag, argv[i + 1]))) {
                std::cerr << "unknown flag, or one without a value: " << flag << "\n" << usage;
                std::exit(2);
            } else {
                ++i;
            }
        }
        return o;
    }

  private:
    bool set(const std::string& flag, const std::string& value) {
        if (flag == "--host") return host = value, true;
        if (flag == "--api-key") return api_key = value, true;
        constexpr auto any = std::numeric_limits<std::uint64_t>::max();
        if (flag == "--port") return port = static_cast<int>(number(flag, value, 1, 65535)), true;
        if (flag == "--num-envs") return num_envs = number(flag, value, 1, 65536), true;
        if (flag == "--episodes") return episodes = number(flag, value, 0, any), true;
        if (flag == "--replan-steps") return replan_steps = number(flag, value, 0, any), true;
        if (flag == "--seed") return seed = number(flag, value, 0, any), true;
        if (flag == "--reconnect-limit") return reconnect_limit = static_cast<int>(number(flag, value, 0, 1000000000)), true;
        return false;
    }

    static std::uint64_t number(const std::string& flag, const std::string& value, std::uint64_t least, std::uint64_t most) {
        std::uint64_t found = 0;
        const char* last = value.data() + value.size();
        const auto [end, error] = std::from_chars(value.data(), last, found);
        if (error == std::errc() && end == last && found >= least && found <= most) return found;
        std::cerr << flag << " is '" << value << "'; expected a whole number from " << least << " to " << most << "\n";
        std::exit(2);
    }
};

class Client {
  public:
    Client(const Options& options, std::vector<std::unique_ptr<Env>> envs) : options_(options) {
        for (auto& env : envs) {
            env->reset();
            slots_.push_back(Slot{std::move(env)});
        }
    }

    std::uint64_t episodes() const { return episodes_; }
    double mean_return() const { return episodes_ ? total_return_ / static_cast<double>(episodes_) : 0; }

    // Plays until enough episodes are finished, reconnecting as the protocol says; returns the exit code.
    int run() {
        int fruitless = 0;
        while (true) {
            progress_ = false;
            const std::optional<int> code = connect_once();
            if (code) return *code;
            fruitless = progress_ ? 0 : fruitless + 1;
            if (fruitless > options_.reconnect_limit) {
                std::cerr << "giving up after " << fruitless << " fruitless connections\n";
                return 3;
            }
            std::uniform_real_distribution<double> jitter(0.5, 1.0);
            const double wait_s = std::min(5.0, 0.1 * std::pow(2.0, std::min(fruitless, 10))) * jitter(random_);
            std::this_thread::sleep_for(std::chrono::duration<double>(wait_s));
        }
    }

  private:
    // One env, the chunk it holds, and what happened since.
    struct Slot {
        std::unique_ptr<Env> env;
        std::vector<std::vector<double>> chunk = {};
        std::size_t used = 0;
        double reward = 0;
        Outcome last = {};
        std::int64_t completed = 0;  // chunks in this episode
        std::int64_t length = 0;     // env steps in this episode
        double episode_return = 0;
        std::optional<Observation> known = {};  // what the last feedback on this connection told, unless a done

        bool done() const { return last.terminated || last.truncated; }
        bool due() const { return used > 0 && (done() || used == chunk.size()); }
        void drop_chunk() {
            chunk.clear();
            used = 0;
            reward = 0;
            last = {};
        }
        void begin_episode() {
            env->reset();
            completed = length = 0;
            episode_return = 0;
        }
    };
    using Ids = std::vector<std::size_t>;

    std::optional<int> connect_once() {
        const std::string header = options_.api_key.empty() ? "" : "Authorization: Api-Key " + options_.api_key;
        try {
            WebSocket socket(options_.host, options_.port, header);
            try {
                play(socket);
            } catch (const WireError&) {
                socket.close(1002);
                throw;
            }
            socket.close(1000);
            return 0;
        } catch (const Closed& closed) {
            std::cerr << "connection closed: " << closed.what() << "\n";
            if (closed.code == 1001 && closed.reason == "plugrl-server-stop") {
                return options_.wait_for_next_run ? std::nullopt : std::optional<int>(0);
            }
            const bool retry = closed.code == 1001 || closed.code == 1006 || closed.code == 1012 || closed.code == 1013;
            return retry ? std::nullopt : std::optional<int>(1);
        } catch (const HttpRefused& refused) {
            std::cerr << "refused by the server: " << refused.what();
            std::cerr << (refused.status == 401 ? ", which wants another key: --api-key, or PLUGRL_API_KEY\n" : "\n");
            const bool busy = refused.status == 502 || refused.status == 503 || refused.status == 504;
            return busy ? std::nullopt : std::optional<int>(1);
        } catch (const Unreachable& error) {
            std::cerr << "no server at " << options_.host << ":" << options_.port << ": " << error.what() << "\n";
            return std::nullopt;
        } catch (const WireError& error) {
            std::cerr << "giving up: " << error.what() << "\n";
            return 1;
        }
    }

    void play(WebSocket& socket) {
        read_metadata(socket);
        Ids asking;
        for (std::size_t i = 0; i < slots_.size(); ++i) {
            // Actions of an earlier connection are void, and so is the feedback on them.
            if (slots_[i].done()) slots_[i].begin_episode();
            slots_[i].drop_chunk();
            slots_[i].known.reset();
            asking.push_back(i);
        }
        while (episodes_ < options_.episodes) {
            infer(socket, asking);
            asking = step_until_due();
            feedback(socket, asking);
            progress_ = true;
        }
    }

    // A message of this kind; `frame` keeps the bytes that the values look at.
    static Value receive(WebSocket& socket, std::string& frame, std::string_view kind) {
        WebSocket::Message message = socket.receive();
        if (message.text) throw WireError("a text frame from the server: " + message.payload.substr(0, 80));
        frame = std::move(message.payload);
        Value root = Unpacker::unpack(frame);
        const Value* type = root.find("message_type");
        if (!type || type->kind != Value::Kind::str || type->bytes != kind) {
            throw WireError("a message of another kind than " + std::string(kind) + " from the server");
        }
        return root;
    }

    // Everything in the metadata is optional, and what is unknown is ignored.
    void read_metadata(WebSocket& socket) {
        std::string frame;
        const Value root = receive(socket, frame, "metadata");
        const Value* data = root.find("data");
        if (!data || data->kind != Value::Kind::map) throw WireError("metadata without a map of data");
        const Value* dim = data->find("action_dim");
        if (dim && dim->kind == Value::Kind::integer && !dim->negative && dim->integer > 0 && dim->integer < 4096) {
            for (Slot& slot : slots_) slot.env->use_action_dim(dim->integer);
        }
        reuse_ = chunk_steps_ = false;
        const Value* features = data->find("features");
        for (const Value& feature : features && features->kind == Value::Kind::list ? features->items : std::vector<Value>{}) {
            reuse_ = reuse_ || (feature.bytes == "reuse-feedback-obs" && options_.reuse);
            chunk_steps_ = chunk_steps_ || (feature.bytes == "chunk-steps" && options_.chunk_steps);
        }
    }

    void infer(WebSocket& socket, const Ids& asking) {
        std::vector<bool> again;
        std::vector<Observation> rows;
        for (std::size_t i : asking) {
            Observation row = slots_[i].env->observe();
            again.push_back(reuse_ && slots_[i].known && *slots_[i].known == row);
            // With all rows reused, the names and sizes still travel, with no rows.
            if (!again.back()) rows.push_back(std::move(row));
        }
        Packer out;
        out.map(reuse_ ? 5 : 4);
        pack_head(out, "infer", asking);
        if (reuse_) {
            out.str("reuse");
            out.array_b1(again);
        }
        out.str("data");
        pack_observation(out, rows);
        socket.send(out.bytes());
        read_action(socket, asking);
    }

    void read_action(WebSocket& socket, const Ids& asking) {
        std::string frame;
        const Value root = receive(socket, frame, "action");
        const Value* data = root.find("data");
        if (!data) throw WireError("an action without data");
        const Array ids = Array::from(data->find("env_ids"), "env_ids");
        const Array action = Array::from(data->find("action"), "action");
        bool same = ids.shape.size() == 1 && ids.kind != 'U' && ids.size() == asking.size();
        for (std::size_t j = 0; same && j < asking.size(); ++j) same = ids.number(j) == static_cast<double>(asking[j]);
        if (!same) throw WireError("an action whose env_ids are not those asked for, in order");
        const bool shaped = action.kind != 'U' && action.shape.size() >= 2 && action.shape[0] >= 1 &&
                            action.shape[1] == asking.size() && action.size() > 0;
        if (!shaped) throw WireError("an action that is not [H, n, ...] numbers");
        const std::size_t horizon = action.shape[0], dim = action.size() / horizon / asking.size();
        const std::size_t steps = options_.replan_steps ? std::min(options_.replan_steps, horizon) : horizon;
        for (Slot& slot : slots_) slot.env->use_action_dim(dim);
        for (std::size_t j = 0; j < asking.size(); ++j) {
            slots_[asking[j]].drop_chunk();
            for (std::size_t k = 0; k < steps; ++k) {
                std::vector<double> step(dim);
                for (std::size_t d = 0; d < dim; ++d) {
                    step[d] = action.number((k * asking.size() + j) * dim + d);
                    if (!std::isfinite(step[d])) throw WireError("an action that is not finite");
                }
                slots_[asking[j]].chunk.push_back(std::move(step));
            }
        }
    }

    // Steps all envs together until some chunk is over; a done ends its chunk early.
    Ids step_until_due() {
        Ids due;
        while (due.empty()) {
            for (std::size_t i = 0; i < slots_.size(); ++i) {
                Slot& slot = slots_[i];
                slot.last = slot.env->step(slot.chunk[slot.used++]);
                slot.reward += slot.last.reward;
                slot.episode_return += slot.last.reward;
                ++slot.length;
                if (slot.due()) due.push_back(i);
            }
        }
        return due;
    }

    void feedback(WebSocket& socket, const Ids& due) {
        Packer out;
        std::vector<double> rewards;
        std::vector<bool> terminated, truncated;
        std::vector<std::int64_t> steps;
        std::vector<Observation> rows;
        bool any_done = false;
        for (std::size_t i : due) {
            const Slot& slot = slots_[i];
            rewards.push_back(slot.reward);
            terminated.push_back(slot.last.terminated);
            truncated.push_back(slot.last.truncated);
            steps.push_back(static_cast<std::int64_t>(slot.used));
            rows.push_back(slot.env->observe());
            any_done = any_done || slot.done();
        }
        out.map(chunk_steps_ ? 5 : 4);
        pack_head(out, "feedback", due);
        if (chunk_steps_) {
            out.str("steps");
            out.array_i8(steps);
        }
        out.str("data");
        out.map(5);
        out.str("obs");
        pack_observation(out, rows);
        out.str("rewards");
        out.array_float(rewards, {due.size()}, 4);
        out.str("terminated");
        out.array_b1(terminated);
        out.str("truncated");
        out.array_b1(truncated);
        out.str("info");
        pack_info(out, due, any_done);
        socket.send(out.bytes());
        for (std::size_t row = 0; row < due.size(); ++row) settle(slots_[due[row]], rows[row]);
    }

    // The feedback is on its way: begin the next chunk or the next episode.
    void settle(Slot& slot, const Observation& told) {
        if (slot.done()) {
            ++episodes_;
            total_return_ += slot.episode_return;
            slot.known.reset();
            slot.begin_episode();
        } else {
            slot.known = told;
            ++slot.completed;
        }
        slot.drop_chunk();
    }

    void pack_info(Packer& out, const Ids& due, bool any_done) const {
        out.map(any_done ? 1 : 0);
        if (!any_done) return;
        std::vector<double> returns;
        std::vector<std::int64_t> lengths;
        std::vector<bool> successes, mask;
        for (std::size_t i : due) {
            returns.push_back(slots_[i].episode_return);
            lengths.push_back(slots_[i].length);
            successes.push_back(slots_[i].env->succeeded());
            mask.push_back(slots_[i].done());
        }
        out.str("episode");
        out.map(4);
        out.str("r");
        out.array_float(returns, {due.size()}, 4);
        out.str("l");
        out.array_i8(lengths);
        out.str("s");
        out.array_b1(successes);
        out.str("mask");
        out.array_b1(mask);
    }

    void pack_head(Packer& out, const char* kind, const Ids& ids) const {
        std::vector<std::int64_t> indices, completed;
        for (std::size_t i : ids) {
            indices.push_back(static_cast<std::int64_t>(i));
            completed.push_back(slots_[i].completed);
        }
        out.str("message_type");
        out.str(kind);
        out.str("env_indices");
        out.array_i8(indices);
        out.str("step_ids");
        out.array_i8(completed);
    }

    void pack_observation(Packer& out, const std::vector<Observation>& rows) const {
        const Observation like = rows.empty() ? slots_[0].env->observe() : rows[0];
        out.map(3);
        out.str("images");
        out.map(like.images.size());
        for (std::size_t c = 0; c < like.images.size(); ++c) {
            std::string pixels;
            for (const Observation& row : rows) pixels += row.images.at(c).second.pixels;
            const Image& image = like.images[c].second;
            out.str(like.images[c].first);
            out.array("|u1", {rows.size(), image.height, image.width, image.channels}, pixels);
        }
        out.str("states");
        out.map(like.states.size());
        for (std::size_t s = 0; s < like.states.size(); ++s) {
            std::vector<double> numbers;
            for (const Observation& row : rows) {
                const auto& state = row.states.at(s).second;
                numbers.insert(numbers.end(), state.begin(), state.end());
            }
            out.str(like.states[s].first);
            out.array_float(numbers, {rows.size(), like.states[s].second.size()}, slots_[0].env->state_bytes());
        }
        std::vector<std::string> texts;
        for (const Observation& row : rows) texts.push_back(row.text);
        out.str("text");
        out.array_text(texts);
    }

    Options options_;
    std::vector<Slot> slots_;
    std::mt19937 random_{std::random_device{}()};
    std::uint64_t episodes_ = 0;
    double total_return_ = 0;
    bool progress_ = false, reuse_ = false, chunk_steps_ = false;
};

}  // namespace plugrl
